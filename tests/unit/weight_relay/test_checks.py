"""Settings that cannot be are refused at the start, by name and with a remedy."""

from typing import Any

import pytest

from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest
from ebbtide.weight_relay.service import check_settings
from ebbtide.weight_relay.settings import RelaySettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"advertise": "!!nonsense"}, "advertise: .*give host:port"),
        ({"advertise": "unix:/tmp/socket"}, "advertise: .*give host:port"),
        ({"static_copies": ("ftp://x",)}, r"static_copies: 'ftp://x' .*give http\(s\)://"),
        ({"static_copies": ("http://",)}, "static_copies: "),
        ({"static_copies": ("http://x:port/",)}, "static_copies: "),
        ({"static_copies": ("http://x",), "upstream": "relay:1"}, "static_copies: .*name the copy as `upstream`"),
        ({"link_limits": ("=5",)}, "link_limits: '=5' must be NAME=BYTES_PER_S"),
        ({"link_limits": ("north=abc",)}, "link_limits: 'north=abc' must be NAME=BYTES_PER_S"),
        ({"upstream": "http://"}, "upstream: "),
        ({"upstream": "nowhere"}, "upstream: "),
        ({"upstream": "127.0.0.1:7610"}, "upstream: .*own address; name the relay"),
        ({"upstream": "localhost:7610"}, "upstream: .*own address"),
        ({"upstream": "relay:1", "advertise": "relay:1"}, "upstream: .*own address"),
        ({"upstream": "localhost:7610", "server": ServerSettings.at("0.0.0.0:7610")}, "upstream: .*own address"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_settings(RelaySettings(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"advertise": "relay.north:7610", "upstream": "relay.south:7610", "link_limits": ("north=1e6", "*=0")},
        {"advertise": "[::1]:7610", "upstream": "127.0.0.1:7611"},
        {"upstream": "https://copies.example/run"},
        {"static_copies": ("http://127.0.0.1:8000/run",)},
    ],
)
def test_what_can_be_is_taken(settings: dict[str, Any]) -> None:
    check_settings(RelaySettings(**settings))
