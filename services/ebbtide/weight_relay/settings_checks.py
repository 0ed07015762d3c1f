"""Checks a relay's settings at its start, before a reader or a publisher meets the mistake."""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from ebbtide.auth.security import is_loopback
from ebbtide.errors import InvalidRequest
from ebbtide.rpc.channel import check_address
from ebbtide.rpc.leader_channel import addresses
from ebbtide.scheduling.distribution.link_turns import parse_limits
from ebbtide.transfer.sources.tile_source import check_peer
from ebbtide.weight_relay.settings import RelaySettings

_WILDCARDS = {"0.0.0.0", "[::]", "::"}  # noqa: S104 - compared with, not listened at


def check_settings(settings: RelaySettings) -> Mapping[str, float]:
    """Return the limits of links, by site. Raises `InvalidRequest` for wrong settings, naming the field."""
    try:
        limits = parse_limits(settings.link_limits)
    except ValueError as error:
        raise InvalidRequest(str(error), field="link_limits") from None
    if settings.static_copies and settings.upstream:
        text = "is for a relay without an upstream; name the copy as `upstream`, or to the relay that is followed"
        raise InvalidRequest(text, field="static_copies")
    for url in settings.static_copies:
        _check_url(url, "static_copies")
    if settings.advertise:
        check_peer(settings.advertise, field="advertise")
    if settings.coordinator:
        addresses(settings.coordinator)
    if is_url(settings.upstream):
        _check_url(settings.upstream, "upstream")
    elif settings.upstream:
        check_address(settings.upstream, field="upstream")
        _check_another(settings)
    return limits


def is_url(upstream: str) -> bool:
    """Whether an upstream is a static copy."""
    return upstream.startswith(("http://", "https://"))


def _check_url(text: str, field: str) -> None:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{text!r} is no URL of a static copy: give http(s)://HOST/FOLDER", field=field)


def _check_another(settings: RelaySettings) -> None:
    own = [address for address in (settings.server.listen, settings.advertise) if address]
    if any(_same(settings.upstream, address) for address in own):
        text = f"{settings.upstream} is this relay's own address; name the relay that it is to follow"
        raise InvalidRequest(text, field="upstream")


def _same(upstream: str, own: str) -> bool:
    """Whether both are surely one server on this host."""
    if upstream == own:
        return True
    (host, _, port), (own_host, _, own_port) = upstream.rpartition(":"), own.rpartition(":")
    if port != own_port or "unix" in (host, own_host):
        return False
    here = is_loopback(upstream) or host in (socket.gethostname(), *_WILDCARDS)
    return here and (own_host in _WILDCARDS or is_loopback(own))
