"""A relay lets go of a run's versions when it hears that the run has ended, and not for less."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import LeaseSuperseded, NotReady, Unavailable
from ebbtide.rpc.run_endings import EndedRun, RunsEnded
from ebbtide.types.run import RunStatus
from ebbtide.weight_relay.intake import version_intake
from ebbtide.weight_relay.library.run_ends import RunEndFollower
from ebbtide.weight_relay.library.version_index import VersionStage, make_stage
from ebbtide.weight_relay.service import WeightRelay
from tests.fakes.clocks import SetClock
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, publish, put, relay_at

FINISHED, CANCELLED = RunStatus.FINISHED, RunStatus.CANCELLED


class Source:
    """Says what a test puts in, and notes what it was asked about."""

    target = "a coordinator"

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.said: asyncio.Queue[RunsEnded | Exception] = asyncio.Queue()

    async def ask(self, held: tuple[str, ...]) -> AsyncIterator[RunsEnded]:
        self.asked.append(held)
        while True:
            message = await self.said.get()
            if isinstance(message, Exception):
                raise message
            yield message

    def ends(self, *run_ids: str, status: RunStatus = CANCELLED) -> None:
        self.said.put_nowait(RunsEnded(ended=tuple(EndedRun(run_id, status) for run_id in run_ids)))

    def lives(self, *run_ids: str, life: str = "one") -> None:
        self.said.put_nowait(RunsEnded(live=run_ids, store_life=life))

    async def close(self) -> None:
        """Nothing is open."""


class House:
    def __init__(self, folder: Path, relay: WeightRelay, source: Source, clock: SetClock, ends: RunEndFollower) -> None:
        self.folder, self.relay, self.source, self.clock, self.ends = folder, relay, source, clock, ends

    def files(self) -> list[str]:
        folders = ("tiles", "versions", "arriving", "keys")
        walked = [found for name in folders for found in os.walk(self.folder / name)]  # what goes meanwhile is no error
        return [name for _, below, files in walked for name in (*below, *files)]

    async def asked_about(self, *run_ids: str) -> None:
        await wait_until(lambda: self.source.asked and self.source.asked[-1] == run_ids)


@asynccontextmanager
async def house_at(folder: Path, **settings: Any) -> AsyncIterator[House]:
    clock, source = SetClock(), Source()
    relay = relay_at(folder, clock)
    await relay.open()
    ends = RunEndFollower(
        relay.collector,
        relay.ended,
        relay.fanout.forget,
        source,  # type: ignore[arg-type]
        clock=clock,
        **settings,
    )
    running = asyncio.create_task(ends.run())
    try:
        yield House(folder, relay, source, clock, ends)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await relay.close()


@pytest.fixture
def line() -> Line:
    return Line(3, sizes=SMALL)


async def test_what_is_kept_of_a_run_goes_with_its_end(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        for version in line.versions[:2]:
            await publish(house.relay, version)
        await put(house.relay, line[3])
        assert house.files()
        house.source.ends("run")
        await wait_until(lambda: not house.files())
        assert not held(house.relay)
        with pytest.raises(LeaseSuperseded, match="has ended"):
            await house.relay.intake.begin(line[3].manifest, line[3].patch)


@pytest.mark.parametrize("arriving", [False, True])
async def test_a_version_whose_run_ends_while_it_is_checked_is_not_taken(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, *, arriving: bool
) -> None:
    checking, checked = threading.Event(), threading.Event()

    def slowly(*args: Any, **more: Any) -> VersionStage:
        checking.set()
        assert checked.wait(10)
        return make_stage(*args, **more)

    monkeypatch.setattr(version_intake, "make_stage", slowly)
    async with house_at(tmp_path) as house:
        beginning = asyncio.create_task(house.relay.intake.begin(line[1].manifest, arriving=arriving))
        await wait_until(checking.is_set)
        house.relay.ended.add(EndedRun("run", CANCELLED))
        await house.relay.collector.forget_run("run")
        checked.set()
        with pytest.raises(LeaseSuperseded, match="has ended"):
            await beginning
        assert not house.relay.collector.held()
        assert not house.files()


async def test_what_was_staged_of_a_finished_run_is_committed_while_its_versions_are_kept(
    tmp_path: Path, line: Line
) -> None:
    async with house_at(tmp_path, keep_ended_s=60.0) as house:
        await put(house.relay, line[1], arriving=True)
        house.source.ends("run", status=FINISHED)
        await wait_until(lambda: "run" in house.relay.ended)
        await house.relay.intake.commit("run", line[1].manifest.version)
        assert held(house.relay) == [1]


async def test_what_was_staged_of_a_run_that_was_let_go_is_not_committed(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        await put(house.relay, line[1])
        house.source.ends("run")
        await wait_until(lambda: not house.files())
        with pytest.raises(NotReady, match="not staged"):
            await house.relay.intake.commit("run", line[1].manifest.version)


async def test_other_runs_keep_what_they_share_with_it(tmp_path: Path, line: Line) -> None:
    other = Line(1, sizes=SMALL, run_id="other")
    async with house_at(tmp_path) as house:
        await publish(house.relay, line[1])
        for digest in await house.relay.intake.begin(other[1].manifest, None):
            await house.relay.intake.put(digest, other[1].tiles[digest])
        await house.relay.intake.commit("other", other[1].manifest.version)
        house.source.ends("run")
        await wait_until(lambda: not held(house.relay))
        for digest in other[1].tiles:
            assert await house.relay.reader.tile(digest) == other[1].tiles[digest]


async def test_a_relay_that_was_away_asks_about_all_that_it_finds(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        await publish(house.relay, line[1])
    async with house_at(tmp_path) as house:
        await house.asked_about("run")
        house.source.ends("run")
        await wait_until(lambda: not house.files())


async def test_a_run_that_came_meanwhile_is_asked_about(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        await house.asked_about()
        await publish(house.relay, line[1])
        await house.asked_about("run")


async def test_a_run_that_is_merely_unknown_stays(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        await publish(house.relay, line[1])
        await house.asked_about("run")
        house.source.lives("another")
        house.source.ends("another")
        await wait_until(lambda: "another" in house.relay.ended)
        assert held(house.relay) == [1]


@pytest.mark.parametrize(("life", "kept"), [("one", False), ("another", True)])
async def test_a_run_that_lived_goes_unknown_in_the_same_life_of_the_store_alone(
    tmp_path: Path, line: Line, life: str, kept: bool
) -> None:
    async with house_at(tmp_path) as house:
        await publish(house.relay, line[1])
        await house.asked_about("run")
        house.source.lives("run")
        house.source.said.put_nowait(Unavailable("away"))
        house.source.lives("another", life=life)
        house.source.ends("another")
        await wait_until(lambda: "another" in house.relay.ended)
        assert ("run" not in house.relay.ended) is kept
        if not kept:
            await wait_until(lambda: not held(house.relay))


async def test_a_finished_runs_versions_stay_as_long_as_is_said_and_a_cancelled_ones_do_not(
    tmp_path: Path, line: Line
) -> None:
    async with house_at(tmp_path, keep_ended_s=60.0) as house:
        await publish(house.relay, line[1])
        house.source.ends("run", status=FINISHED)
        await wait_until(lambda: "run" in house.relay.ended)
        house.source.ends("another", status=CANCELLED)
        await wait_until(lambda: "another" in house.relay.ended)
        assert held(house.relay) == [1]
        house.clock.now = 61.0
        house.source.ends("third")
        await wait_until(lambda: not held(house.relay))


async def test_an_id_that_lives_again_is_taken_again(tmp_path: Path, line: Line) -> None:
    async with house_at(tmp_path) as house:
        house.source.ends("run")
        await wait_until(lambda: "run" in house.relay.ended)
        house.source.lives("run")
        await wait_until(lambda: "run" not in house.relay.ended)
        await publish(house.relay, line[1])
        assert held(house.relay) == [1]


async def test_a_relay_behind_this_one_is_told_and_asked_for(tmp_path: Path) -> None:
    async with house_at(tmp_path) as house:
        answers = house.ends.answer(("theirs",))
        assert await anext(answers) == RunsEnded()
        await house.asked_about("theirs")
        house.source.ends("theirs")
        assert await anext(answers) == RunsEnded(ended=(EndedRun("theirs", CANCELLED),))
        await answers.aclose()  # type: ignore[attr-defined]
        again = house.ends.answer(("theirs", "unknown"))
        assert (await anext(again)).ended == (EndedRun("theirs", CANCELLED),)
        await again.aclose()  # type: ignore[attr-defined]
