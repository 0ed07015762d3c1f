"""A borrowed engine's weights move as the grants wish, as far as they can, and are never between levels unnoticed."""

import asyncio
from typing import Any, cast

import pytest

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.guard_link import WeightSleep
from ebbtide.types.grants import Residency
from tests.support.waiting import wait_until

AWAKE, HOST, AWAY = Residency.AWAKE, Residency.HOST, Residency.AWAY


class Recorder:
    """Engine and installer in one: what was asked of them, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_rest = True
        self.refusals: list[Exception] = []
        self.going = asyncio.Event()
        self.going.set()

    by_stages = True

    async def give_up_cache(self) -> None:
        self.asked.append("cache")

    async def wake(self) -> None:
        self.asked.append("wake")

    async def give_up_weights(self) -> None:
        self.asked.append("weights")
        await self.going.wait()

    async def release_cache(self) -> None:
        self.asked.append("release")

    async def take_cache(self) -> None:
        self.asked.append("take")

    def rest(self) -> bool:
        return self.may_rest

    async def restore(self) -> None:
        self.asked.append("restore")
        if self.refusals:
            raise self.refusals.pop()


def asleep_by(recorder: Recorder) -> WeightSleep:
    return WeightSleep(cast("Any", recorder), cast("Any", recorder))


@pytest.mark.parametrize(
    ("levels", "asked"),
    [
        ([HOST, AWAKE], ["cache", "wake"]),
        ([AWAY, AWAKE], ["cache", "weights", "restore"]),
        ([HOST, AWAY, AWAKE], ["cache", "weights", "restore"]),
        ([AWAY, HOST, AWAKE], ["cache", "weights", "restore"]),
        ([AWAKE, HOST, HOST, AWAKE, AWAKE], ["cache", "wake"]),
    ],
)
async def test_each_step_down_is_made_once_and_a_wake_up_undoes_all(levels: list[Residency], asked: list[str]) -> None:
    recorder = Recorder()
    sleeping = asleep_by(recorder)
    for level in levels:
        await sleeping.be(level)
    assert recorder.asked == asked
    assert sleeping.residency is AWAKE


@pytest.mark.parametrize(
    ("levels", "asked"),
    [
        ([HOST, AWAKE], ["cache", "wake"]),
        ([AWAY, AWAKE], ["weights", "restore"]),
        ([HOST, AWAY, AWAKE], ["cache", "wake"]),
        ([AWAY, HOST, AWAKE], ["weights", "restore"]),
    ],
)
async def test_an_engine_on_a_gpu_gives_all_its_memory_up_once_at_either_level(
    levels: list[Residency], asked: list[str]
) -> None:
    recorder = Recorder()
    recorder.by_stages = False
    sleeping = asleep_by(recorder)
    for level in levels:
        await sleeping.be(level)
    assert recorder.asked == asked
    assert sleeping.residency is AWAKE


async def test_an_engine_on_a_gpu_without_a_way_back_keeps_its_weights_in_host_memory() -> None:
    recorder = Recorder()
    recorder.by_stages = recorder.may_rest = False
    sleeping = asleep_by(recorder)
    await sleeping.be(AWAY)
    assert recorder.asked == ["cache"]
    assert sleeping.residency is HOST


async def test_wake_ups_are_measured_by_the_level_that_they_came_from() -> None:
    recorder = Recorder()
    sleeping = asleep_by(recorder)
    assert (sleeping.wake_host_s, sleeping.wake_away_s) == (0, 0)
    await sleeping.be(HOST)
    await sleeping.be(AWAKE)
    assert sleeping.wake_host_s > 0 == sleeping.wake_away_s
    await sleeping.be(AWAY)
    await sleeping.be(AWAKE)
    assert sleeping.wake_away_s > 0


async def test_weights_without_a_way_back_stay_and_the_cache_goes() -> None:
    recorder = Recorder()
    recorder.may_rest = False
    sleeping = asleep_by(recorder)
    await sleeping.be(AWAY)
    assert recorder.asked == ["cache"]
    assert sleeping.residency is HOST
    recorder.may_rest = True
    await sleeping.be(AWAY)
    assert sleeping.residency is AWAY


async def test_weights_that_do_not_come_back_are_away_still_and_may_be_asked_for_again() -> None:
    recorder = Recorder()
    recorder.refusals = [Unavailable("the relay is gone")]
    sleeping = asleep_by(recorder)
    await sleeping.be(AWAY)
    await sleeping.be(AWAKE)
    assert sleeping.residency is AWAY
    await sleeping.be(AWAKE)
    assert sleeping.residency is AWAKE


async def test_each_reason_why_weights_do_not_come_back_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    sleeping = asleep_by(recorder)
    for _ in range(2):
        recorder.refusals = [Unavailable("the relay is gone"), *[Unavailable("a version is on its way")] * 3]
        await sleeping.be(AWAY)
        for _ in range(5):
            await sleeping.be(AWAKE)
        assert sleeping.residency is AWAKE
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("do not come back yet") == 4, "two reasons of each sleep"


async def test_an_engine_that_is_lost_over_it_is_not_taken_for_one_that_sleeps() -> None:
    recorder = Recorder()
    recorder.refusals = [EngineFailed("a mixture")]
    sleeping = asleep_by(recorder)
    await sleeping.be(AWAY)
    with pytest.raises(EngineFailed):
        await sleeping.be(AWAKE)


async def test_a_wake_up_waits_for_the_way_down_to_end() -> None:
    recorder = Recorder()
    recorder.going.clear()
    sleeping = asleep_by(recorder)
    down = asyncio.create_task(sleeping.be(AWAY))
    up = asyncio.create_task(sleeping.be(AWAKE))
    await wait_until(lambda: "weights" in recorder.asked)
    assert sleeping.residency is AWAY, "half gone is gone"
    assert "restore" not in recorder.asked
    recorder.going.set()
    await asyncio.gather(down, up)
    assert sleeping.residency is AWAKE


async def test_an_engine_without_a_cache_keeps_its_weights_and_takes_the_cache_back_once() -> None:
    recorder = Recorder()
    sleeping = asleep_by(recorder)
    for wanted in (True, False, False, True, True):
        await sleeping.keep_cache(wanted=wanted)
    assert recorder.asked == ["release", "take"]
    assert sleeping.residency is AWAKE


async def test_an_engine_that_wakes_has_its_cache_whatever_it_gave_up_before_it_slept() -> None:
    recorder = Recorder()
    sleeping = asleep_by(recorder)
    await sleeping.keep_cache(wanted=False)
    await sleeping.be(HOST)
    await sleeping.keep_cache(wanted=True)
    assert recorder.asked == ["release", "cache"], "asleep it has none"
    await sleeping.be(AWAKE)
    await sleeping.keep_cache(wanted=True)
    assert recorder.asked == ["release", "cache", "wake"]
