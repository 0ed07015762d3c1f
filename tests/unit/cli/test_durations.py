"""Durations are taken as people write them, or refused by name."""

import pytest

from ebbtide.cli.cluster_connection import seconds
from ebbtide.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 30),
        ("30s", 30),
        (" 2m ", 120),
        ("1.5m", 90),
        ("500ms", 0.5),
        ("1h", 3600),
        (".5 s", 0.5),
        ("2M", 120),
        ("7d", 604800),
    ],
)
def test_a_duration_may_be_written_in_any_common_way(text: str, expected: float) -> None:
    assert seconds(text, field="--within") == expected


@pytest.mark.parametrize("text", ["", "soon", "30x", "-5s", "1e3", "2m30s", "s", "٣s"])
def test_what_is_no_duration_is_refused_with_the_field_and_the_remedy(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no duration: write 30, 30s, 2m or 1h") as refusal:
        seconds(text, field="--within")
    assert refusal.value.field == "--within"


@pytest.mark.parametrize("text", ["0", "0s", "0.0m"])
def test_no_time_at_all_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="leaves no time"):
        seconds(text, field="--within")
