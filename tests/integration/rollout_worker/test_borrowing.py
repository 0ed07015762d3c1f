"""A borrowed worker generates while its guard lets it, and stands still by itself when nobody does."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import page_path
from ebbtide.rollout_worker import device_lease
from ebbtide.rollout_worker.service import serve
from ebbtide.runtime import Shutdown
from ebbtide.types.fleet import WorkerKind, WorkerState
from ebbtide.types.run import Sampling
from ebbtide.v1 import fleet_pb2, grants_pb2
from tests.fakes.scripted_relay import RUN
from tests.integration.rollout_worker.guards import Guard, guarding
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]
LONG = Sampling(temperature=1.0, max_tokens=4000)
#: From the loss of a guard until nothing more is made.
STILL_S = 0.25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "grants"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
async def guard(folder: Path, house: House) -> AsyncIterator[Guard]:
    async with guarding(folder, house.name) as made:
        yield made


async def borrow(house: House, folder: Path, **changes: Any) -> Any:
    """An attached worker without a version."""
    worker = await house.worker(version=0, kind=WorkerKind.BORROWED, grant_dir=str(folder), **changes)
    await house.coordinator.hear("heartbeat")
    return worker


async def working(house: House, guard: Guard, folder: Path, **changes: Any) -> Any:
    """One that has made some tokens of rollout `r`."""
    worker = await borrow(house, folder, **changes)
    await guard.found()
    guard.allow(64)
    house.coordinator.install(house.relay.publish(1))
    await house.coordinator.hear("installed")
    house.coordinator.assign("r", LONG)
    await wait_until(lambda: house.coordinator.length("r") > 20)
    return worker


def beat(house: House) -> fleet_pb2.Heartbeat:
    newest: fleet_pb2.Heartbeat = house.coordinator.heard["heartbeat"][-1]
    return newest


def installing(house: House) -> bool:
    return WorkerState(beat(house).state) is WorkerState.INSTALLING


async def still(house: House, guard: Guard) -> int:
    """How many tokens had been made when the worker stood still; it made none in the time of a hold."""
    page = guard.page

    def standing() -> bool:
        steps = page.steps()
        return not page.budget().tokens and not steps.stepping and bool(house.generated() == steps.scheduled)

    await wait_until(standing)
    made: int = house.generated()
    await wait_until(lambda: beat(house).held, what="a hold")
    assert house.generated() == made, "a token came without a budget"
    return made


async def goes_on(house: House, made: int, expected: Expected) -> None:
    """The rollout goes on from the token at which it stood still, exactly."""
    await wait_until(lambda: house.coordinator.length("r") > made + 20)
    assert house.coordinator.ids("r")[: made + 20] == expected(made + 20)


async def test_a_worker_generates_while_it_is_granted_and_not_beyond(
    house: House, guard: Guard, folder: Path, expected: Expected
) -> None:
    worker = await working(house, guard, folder)
    guard.allow(0)
    made = await still(house, guard)
    assert house.coordinator.length("r") == made, "what was made is stored"
    guard.allow(64)
    await wait_until(lambda: not beat(house).held)
    await goes_on(house, made, expected)
    await worker.end()


async def test_a_guard_learns_whom_it_may_stop_and_what_runs_there(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder, slots=7, step_tokens=99)
    hello = guard.hellos[0]
    assert (hello.worker_id, list(hello.pids)) == (house.name, [os.getpid()])
    assert (hello.slots, hello.step_tokens) == (7, 99)
    await wait_until(lambda: guard.reports[-1].running == 1 and guard.reports[-1].tokens_generated > 20)
    assert guard.reports[-1].wanted
    await worker.end()


async def test_heartbeats_tell_what_the_guard_forecasts(house: House, guard: Guard, folder: Path) -> None:
    guard.fields["forecast"] = grants_pb2.Forecast(share=0.25, spell_s=30.0, disturbance=0.5)
    worker = await working(house, guard, folder)
    found = beat(house).borrowed
    assert (found.granted, found.share, found.spell_s, found.disturbance) == (True, 0.25, 30.0, 0.5)
    guard.allow(0)
    await wait_until(lambda: not beat(house).borrowed.granted)
    assert beat(house).borrowed.share == 0.25
    await worker.end()


async def test_a_worker_whose_guard_falls_silent_pauses_by_itself(
    house: House, guard: Guard, folder: Path, expected: Expected
) -> None:
    worker = await working(house, guard, folder)
    guard.silent = True
    since = time.monotonic()
    made = await still(house, guard)
    assert guard.page.steps().began - since < STILL_S
    guard.silent = False
    await goes_on(house, made, expected)
    await worker.end()


async def test_a_worker_finds_the_next_guard_and_goes_on_exactly(
    house: House, guard: Guard, folder: Path, expected: Expected
) -> None:
    worker = await working(house, guard, folder)
    since = time.monotonic()
    guard.hang_up()
    await wait_until(lambda: len(guard.hellos) == 2, what="another hello")
    assert guard.page.steps().steps
    await goes_on(house, house.generated(), expected)
    assert time.monotonic() - since < 5
    await worker.end()


async def test_a_worker_without_a_guard_attaches_and_says_that_it_cannot_generate(house: House, folder: Path) -> None:
    worker = await borrow(house, folder)
    await wait_until(lambda: beat(house).held)
    found = beat(house)
    assert found.HasField("borrowed")
    assert (found.borrowed.granted, found.borrowed.share) == (False, 0.0)
    async with guarding(folder, house.name) as guard:
        await guard.found()
        guard.allow(64)
        await wait_until(lambda: beat(house).borrowed.granted and not beat(house).held)
    await wait_until(lambda: not beat(house).borrowed.granted, what="the loss of the guard")
    await worker.end()


async def test_a_worker_that_is_not_wanted_holds_no_lease(
    house: House, guard: Guard, folder: Path, expected: Expected
) -> None:
    worker = await working(house, guard, folder)
    house.coordinator.say(borrow=fleet_pb2.Borrow(wanted=False, reason="costs more than it brings"))
    made = await still(house, guard)
    assert [guard.reports[-1].wanted] == [False]
    assert guard.page.offered().tokens, "the guard would let it"
    house.coordinator.say(borrow=fleet_pb2.Borrow(wanted=True))
    await goes_on(house, made, expected)
    assert guard.reports[-1].wanted
    await worker.end()


async def test_a_worker_whose_grant_is_withdrawn_gives_its_lease_back_at_once(
    house: House, guard: Guard, folder: Path
) -> None:
    worker = await working(house, guard, folder)
    guard.fields["tokens"] = 0
    await still(house, guard)
    assert guard.page.budget().tokens == 0
    assert guard.page.offered().tokens
    await worker.end()


async def waits(house: House) -> int:
    """Version 2 is to be installed, and is not; how many installs there were before."""
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: installing(house), what="an install under way")
    heard = len(house.coordinator.heard["installed"])
    beats = len(house.coordinator.heard["heartbeat"])
    await wait_until(lambda: len(house.coordinator.heard["heartbeat"]) > beats + 5)
    assert len(house.coordinator.heard["installed"]) == heard, "the device was touched without a grant"
    return heard


async def test_an_install_waits_for_a_moment_with_a_grant(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder)
    guard.allow(0)
    await still(house, guard)
    heard = await waits(house)
    guard.allow(64)
    await house.coordinator.hear("installed", heard + 1)
    await wait_until(lambda: 2 in house.coordinator.versions("r"))
    assert len(house.coordinator.heard["installed"]) == heard + 1
    await worker.end()


async def test_an_install_waits_where_the_budget_is_for_a_step_beside_requests(
    house: House, guard: Guard, folder: Path
) -> None:
    worker = await working(house, guard, folder)
    guard.allow(64, idle=False)
    heard = await waits(house)
    guard.allow(64)
    await house.coordinator.hear("installed", heard + 1)
    assert len(house.coordinator.heard["installed"]) == heard + 1
    await worker.end()


async def test_an_install_waits_for_a_spell_as_long_as_the_last_one_took(
    house: House, guard: Guard, folder: Path
) -> None:
    worker = await working(house, guard, folder, script={"install_s": 0.3})
    guard.fields["forecast"] = grants_pb2.Forecast(share=0.5, spell_s=0.2)
    await wait_until(lambda: beat(house).borrowed.spell_s == 0.2)
    heard = await waits(house)
    guard.fields["forecast"] = grants_pb2.Forecast(share=0.5, spell_s=60.0)
    await house.coordinator.hear("installed", heard + 1)
    assert len(house.coordinator.heard["installed"]) == heard + 1
    await worker.end()


async def test_an_install_does_not_wait_for_ever(house: House, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lease, "_PATIENCE_S", 0.2)
    worker = await borrow(house, folder)
    house.coordinator.install(house.relay.publish(1))
    await house.coordinator.hear("installed")
    assert not beat(house).borrowed.granted, "it went on without a grant"
    await worker.end()


async def test_a_drain_hands_over_while_the_worker_is_paused(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder)
    guard.allow(0)
    made = await still(house, guard)
    begun = time.monotonic()
    await worker.end()
    assert time.monotonic() - begun < 3
    assert house.coordinator.released() == {"r": "drained"}
    assert house.coordinator.length("r") == made


async def test_a_worker_that_is_paused_releases_a_rollout_when_told(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder)
    guard.allow(0)
    made = await still(house, guard)
    ref = fleet_pb2.AttemptRef(run_id=RUN, rollout_id="r", attempt_id=house.coordinator.fences["r"])
    house.coordinator.say(release=fleet_pb2.Release(attempts=[ref], reason="reclaimed"))
    await wait_until(lambda: house.coordinator.released() == {"r": "reclaimed"})
    assert house.coordinator.length("r") == made
    await worker.end()


async def test_the_page_goes_with_its_worker(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder)
    assert page_path(folder, house.name).exists()
    page = guard.page
    await worker.end()
    assert not page_path(folder, house.name).exists()
    assert page.budget().tokens == 0


async def test_a_stubborn_engine_steps_on_where_its_guard_can_see_it(house: House, guard: Guard, folder: Path) -> None:
    worker = await working(house, guard, folder, script={"stubborn": True})
    guard.allow(0)
    steps = guard.page.steps().steps
    await wait_until(lambda: guard.page.steps().steps > steps + 20)
    assert guard.page.steps().began > 0
    await worker.end()


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"kind": WorkerKind.BORROWED}, "name the folder"),
        ({"grant_dir": "/nowhere"}, "kind borrowed"),
        ({"kind": WorkerKind.BORROWED, "grant_dir": "/proc/nowhere"}, "name another"),
    ],
)
async def test_a_kind_and_a_folder_that_do_not_match_are_refused_before_boot(
    house: House, changes: dict[str, Any], remedy: str
) -> None:
    settings = house.settings(**changes)
    with pytest.raises(InvalidRequest, match=remedy) as refused:
        await asyncio.wait_for(serve(Shutdown("rollout-worker", settings), settings), 10)
    assert refused.value.field == "grant_dir"


async def test_what_was_made_before_a_reclaim_is_stored_long_before_the_next_flush(
    house: House, guard: Guard, folder: Path
) -> None:
    worker = await working(house, guard, folder, flush_interval_ms=60_000, flush_tokens=30)
    guard.allow(0)
    begun = time.monotonic()
    made = await still(house, guard)
    await wait_until(lambda: house.coordinator.length("r") == made, 5.0)
    assert time.monotonic() - begun < 5
    await worker.end()
