"""What a person sees of a run's weights."""

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from ebbtide.cli.views.tables import amount, to_json
from ebbtide.cli.views.weights_screen import head, lines, pictures, watch_weights
from ebbtide.types.weights import (
    Holder,
    HolderState,
    LinkState,
    PatchState,
    PolicyVersion,
    VersionInfo,
    VersionState,
    WeightsState,
)
from tests.support.waiting import wait_until


def version(number: int, *patches: PatchState, keyframe: bool = False, policy: str = "policy") -> VersionState:
    record = PolicyVersion(policy=policy, version=number, step=number - 1, root=bytes([number]) * 32)
    info = VersionInfo(run_id="r", version=record, size=200_000_000, tensors=3)
    return VersionState(info=info, keyframe=keyframe, patches=patches, age_s=65.0)


def holder(name: str, number: int, *, done: bool = True, install_s: float = 0.0) -> HolderState:
    who = Holder(name=name, site="north")
    return HolderState(holder=who, policy="policy", version=number, done=done, install_s=install_s, seen_s=2.2)


STATE = WeightsState(
    versions=(
        version(1, keyframe=True),
        version(
            3, PatchState(base=2, size=4_000_000, density=0.0321), PatchState(base=1, size=7_000_000, composed=True)
        ),
    ),
    holders=(holder("w1", 3, install_s=0.0415), holder("w2", 3, done=False)),
    links=(LinkState(site="north", bytes=1_234_567, bytes_per_s=2e6, limit=1.25e7), LinkState(site="south")),
)


def shown(state: WeightsState, width: int = 200) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=width).print(pictures(state))
    return [line.split() for line in out.getvalue().splitlines()]


def test_versions_are_shown_with_each_way_to_them() -> None:
    rows = shown(STATE)
    assert ["1", "0", "1:05", "200", "MB", "keyframe"] in rows
    assert ["3", "2", "1:05", "200", "MB", "2", "4", "MB", "50x", "3.21%"] in rows
    assert ["1", "7", "MB", "28.6x", "0.00%", "composed"] in rows


def test_holders_are_shown_with_what_they_have_and_how_long_they_paused() -> None:
    rows = shown(STATE)
    assert ["w1", "north", "3", "has", "42", "ms", "2", "s"] in rows
    assert ["w2", "north", "3", "fetches", "-", "2", "s"] in rows


def test_links_are_shown_with_bytes_rate_and_limit() -> None:
    rows = shown(STATE)
    assert ["north", "1.23", "MB", "2", "MB/s", "12.5", "MB/s"] in rows
    assert ["south", "0", "B", "0", "B/s", "none"] in rows


def test_one_line_says_what_the_newest_takes_and_who_has_it() -> None:
    assert head(STATE) == "2 versions, the newest 3 of 200 MB; a patch from 2 takes 50x less; 1 have it, 1 fetch it"
    assert head(WeightsState()) == "no version is here yet"


def test_policies_are_named_where_there_are_several() -> None:
    two = WeightsState(versions=(version(1), version(1, policy="critic")))
    assert [row[:2] for row in shown(two) if row[-1:] == ["MB"]] == [["policy", "1"], ["critic", "1"]]


def test_it_fits_on_a_terminal_of_eighty_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(pictures(STATE))
    assert "…" not in out.getvalue()
    assert shown(STATE, 80)[3:] == shown(STATE)[2:]  # the line on the whole takes two


@pytest.mark.parametrize("name", ["[bold]w1", "w\x1b[2J1"])
def test_what_holders_call_themselves_is_shown_as_it_is_but_for_what_a_terminal_would_obey(name: str) -> None:
    state = WeightsState(versions=(version(1),), holders=(holder(name, 1),))
    out = io.StringIO()
    Console(file=out, width=200).print(pictures(state))
    for text in (out.getvalue(), "\n".join(lines(state))):
        assert "\x1b" not in text
        assert name.replace("\x1b", " ") in text


def test_programs_get_the_records_with_digests_in_hexadecimal() -> None:
    told: dict[str, Any] = json.loads(to_json(STATE))
    assert told["versions"][1]["info"]["version"]["root"] == "03" * 32
    assert told["versions"][1]["patches"][0] == {"base": 2, "size": 4_000_000, "density": 0.0321, "composed": False}
    assert (told["holders"][0]["install_s"], told["links"][0]["limit"]) == (0.0415, 1.25e7)


@pytest.mark.parametrize(
    ("size", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_600, "1 MB"), (5e12, "5 TB")],
)
def test_bytes_are_told_to_three_digits(size: float, said: str) -> None:
    assert amount(size) == said


class Relay:
    """Stands for a client; counts how often it was asked."""

    relay = "127.0.0.1:1"

    def __init__(self) -> None:
        self.asked = 0

    async def describe_weights(self, run_id: str) -> WeightsState:
        assert run_id == "r"
        self.asked += 1
        return STATE


async def test_where_the_output_is_no_terminal_each_look_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    relay = Relay()
    console = Console(file=io.StringIO(), force_terminal=False)
    watching = asyncio.create_task(watch_weights(relay, "r", 0.01, console))  # type: ignore[arg-type]
    await wait_until(lambda: relay.asked >= 3)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    said = capsys.readouterr().out
    assert said.count("version 3: step 2; 200 MB; from 2 4 MB (50x smaller, 3.21% changed); from 1 7 MB") >= 2
    assert "w2 at north fetches version 3; paused -; heard 2 s ago" in said
    assert "to site north: 1.23 MB sent, lately 2 MB/s, limit 12.5 MB/s" in said
