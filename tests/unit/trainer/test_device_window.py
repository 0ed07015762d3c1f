"""When a trainer lends its device and has it back, against a device and a coordinator that are told what to say."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ebbtide.errors import Unavailable
from ebbtide.trainer.collectors import TrajectoryCollector
from ebbtide.trainer.lending import device_window, step_window
from ebbtide.trainer.lending.device_window import DeviceWindow
from ebbtide.types.remaining_work import OpenGroup, RemainingWork
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import make_spec, make_trajectories

GROUPS = 4
OPEN = OpenGroup(prompt=3, running=(4, 4, 4))


class NotedDevice:
    """Notes what is asked of a device."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.spells: list[float] = []

    def lend(self, spell_s: float = 0.0) -> None:
        self.deeds.append("lend")
        self.spells.append(spell_s)

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.deeds.append("hand over" if hand_over else "take back")

    def engines(self) -> frozenset[str]:
        return frozenset({"mine"})

    def engine_bytes(self) -> int:
        return 0


class Told:
    """A lease whose coordinator says what a test wants; a follower of its run."""

    def __init__(self, spec: RunSpec) -> None:
        self.run = self
        self.spec, self.dropped = spec, Counter[int]()
        self.left = RemainingWork()
        self.questions = 0
        self.failure: Exception | None = None
        self.restless = False  # its fleet changes all the time
        self._news = asyncio.Condition()

    async def remaining_work(self, *, groups: int, fleet: str, wait_s: float) -> RemainingWork:
        self.questions += 1
        if self.failure is not None:
            raise self.failure
        if self.restless:
            self.left = replace(self.left, fleet=str(self.questions))
        if fleet == self.left.fleet:
            before = self.left
            async with self._news:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._news.wait_for(lambda: self.left is not before)
                except TimeoutError:
                    pass
        return self.left

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(predicate)

    async def says(self, left: RemainingWork) -> None:
        async with self._news:
            self.left = left
            self._news.notify_all()

    async def notify(self) -> None:
        async with self._news:
            self._news.notify_all()


def engines(*elsewhere: str, open_groups: int = GROUPS, fleet: str = "f", **more: Any) -> RemainingWork:
    names = (*elsewhere, "mine")
    return RemainingWork(
        fleet=fleet,
        groups=(OPEN,) * open_groups,
        open=open_groups,
        newest=1,
        engines=names,
        speeds=more.get("speeds", (1.0,) * len(names)),
        versions=(1,) * len(names),
        rollouts=(3,) * len(names),
        lent=(True,) * len(names),
        spot=(False,) * len(names),
        shares=(1.0,) * len(names),
        step_s=more.get("step_s", 0.01),
        rollout_s=1e-4,
    )


class Trainer:
    """A window, and the groups that its trainer has."""

    def __init__(self, spec: RunSpec, *, fixed_s: float = 0.0) -> None:
        self.spec, self.told, self.device = spec, Told(spec), NotedDevice()
        self.collector = TrajectoryCollector(step=0, max_staleness=0)
        told: Any = self.told
        self.window = DeviceWindow(told, told, self.collector, self.device, self.starved, fixed_s=fixed_s)
        self.starvations = 0

    async def starved(self) -> None:
        self.starvations += 1

    def whole(self) -> bool:
        return self.collector.whole_groups() >= GROUPS

    async def gets(self, *groups: int) -> list[Trajectory]:
        names = {f"s{self.collector.step}.g{group}" for group in groups}
        found = [one for one in make_trajectories(self.spec, self.collector.step, 1) if one.group_id in names]
        for one in found:
            self.collector.add(one)
        await self.told.notify()
        return found

    async def trains(self, learning_s: float = 1.0) -> None:
        """A step from its opening to its end, whose groups come at once: it teaches the planner."""
        await self.window.open()
        await self.gets(*range(GROUPS))
        await self.window.close(self.whole)
        taken = self.collector.take({1: self.collector.step})
        self.window.trained(taken, learning_s=learning_s)


@pytest.fixture
def streams(tmp_path: Path) -> RunSpec:
    return make_spec(
        tmp_path, tmp_path, trainer={"minibatches": 1, "streaming": True}, batch={"groups_per_step": GROUPS}
    )


@asynccontextmanager
async def closing(trainer: Trainer) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(trainer.window.close(trainer.whole))
    try:
        async with asyncio.timeout(20):
            yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_trainer_of_whole_steps_lends_until_all_groups_are_there(streams: RunSpec) -> None:
    whole = replace(streams, trainer=replace(streams.trainer, streaming=False))
    trainer = Trainer(whole)
    trainer.told.left = engines("w", speeds=(50.0, 1.0))
    await trainer.window.open()
    async with closing(trainer) as task:
        await trainer.gets(0, 1, 2)
        await wait_until(lambda: trainer.told.questions > 0)
        assert not task.done()
        await trainer.gets(3)
        await task
    assert trainer.device.deeds == ["lend", "take back"]


async def test_a_streaming_trainer_has_its_device_back_once_the_step_ends_sooner_so(streams: RunSpec) -> None:
    trainer = Trainer(streams)
    trainer.told.left = engines()
    await trainer.trains(learning_s=60.0)
    await trainer.window.open()
    async with closing(trainer) as task:
        await trainer.gets(0, 1)
        await wait_until(lambda: trainer.told.questions > 2)
        assert not task.done(), "nobody else generates the rest"
        await trainer.told.says(engines("w", open_groups=2, fleet="another"))
        await task
    assert trainer.device.deeds[-1] == "hand over"
    assert not trainer.whole()


async def test_a_fleet_that_changes_all_the_time_is_not_asked_for_all_the_time(
    streams: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_window, "_PAUSE_S", 3600.0)
    trainer = Trainer(streams)
    trainer.told.left, trainer.told.restless = engines("w"), True
    await trainer.window.open()
    async with closing(trainer) as task:
        await wait_until(lambda: trainer.told.questions == 2)
        for _ in range(200):
            await asyncio.sleep(0)
        assert trainer.told.questions == 2, "one before the loan, and one at its begin"
        await trainer.gets(*range(GROUPS))
        await task


async def test_a_step_that_others_generate_sooner_is_not_lent_for_at_all(streams: RunSpec) -> None:
    trainer = Trainer(streams)
    trainer.told.left = engines("w")
    await trainer.trains(learning_s=60.0)
    deeds = len(trainer.device.deeds)
    trainer.told.left = engines("w", open_groups=0, speeds=(50.0, 1.0))
    await trainer.window.open()
    async with closing(trainer) as task:
        await task
    assert trainer.device.deeds[deeds:] == []


async def test_a_fixed_window_is_over_after_its_time_whatever_the_plan(streams: RunSpec) -> None:
    trainer = Trainer(streams, fixed_s=0.3)
    trainer.told.left = engines()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await trainer.window.open()
    async with closing(trainer) as task:
        await task
    assert loop.time() - began >= 0.3
    assert trainer.device.deeds[-1] == "hand over"
    assert trainer.device.spells == [0.3]


async def test_while_the_coordinator_is_away_the_device_stays_lent_until_all_groups_are_there(streams: RunSpec) -> None:
    trainer = Trainer(streams)
    trainer.told.failure = Unavailable("nobody is there")
    await trainer.window.open()
    async with closing(trainer) as task:
        await wait_until(lambda: trainer.told.questions >= 2)
        assert not task.done()
        await trainer.gets(*range(GROUPS))
        await task
    assert trainer.device.deeds == ["lend", "take back"]


async def test_the_device_is_lent_again_once_nobody_else_is_left(
    streams: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_window, "AGAIN_S", -inf)
    trainer = Trainer(streams, fixed_s=0.01)
    trainer.told.left = engines("w")
    await trainer.window.open()
    await trainer.window.close(trainer.whole)
    assert trainer.device.deeds == ["lend", "hand over"]
    waiting = asyncio.create_task(trainer.window.groups(trainer.whole, trainer.whole))
    await trainer.told.says(engines(fleet="another"))
    await wait_until(lambda: trainer.device.deeds.count("lend") > 1)
    await trainer.gets(*range(GROUPS))
    await asyncio.wait_for(waiting, 10)
    assert trainer.device.deeds[2] == "lend"


async def test_after_the_last_step_the_device_is_lent_for_evaluation(streams: RunSpec) -> None:
    trainer = Trainer(streams)
    trainer.collector.step = streams.trainer.steps
    await trainer.window.open()
    assert trainer.device.deeds == ["lend"]
    assert trainer.told.questions == 0


async def test_a_step_tells_for_how_long_its_device_was_lent(streams: RunSpec) -> None:
    trainer = Trainer(streams, fixed_s=0.05)
    trainer.told.left = engines("w")
    await trainer.window.open()
    await trainer.gets(0)
    await trainer.window.close(trainer.whole)
    await trainer.gets(*range(1, GROUPS))
    values = trainer.window.trained(trainer.collector.take({1: 0}), learning_s=1.0)
    assert values["lent_s"] >= 0.05
    assert values["window_cuts"] == 1.0
    assert values["window_missing_groups"] == GROUPS - 1


def test_ready_tokens_are_those_of_complete_groups_without_gradients(streams: RunSpec) -> None:
    collector = TrajectoryCollector(step=0, max_staleness=0)
    made = make_trajectories(streams, 0, 1)
    for one in made:
        collector.add(msgspec.structs.replace(one, cursor=one.episode_id))
    tokens = sum(len(one.prompt_ids) // 4 + len(one.loss_mask) for one in made)
    assert collector.new_tokens() == tokens
    collector.hand_out({1: 0})
    assert collector.new_tokens() == 0
