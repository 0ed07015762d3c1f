"""After each event the pages hold what the governor decided at it, or less."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.grants import Page, page_path
from ebbtide.serving_guard.borrowers import BorrowerTable
from ebbtide.serving_guard.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.governor.budget_decider import (
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    MultiModelGovernor,
    StepLimits,
)
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.slo_stats import SloStats
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Budget, Hello
from tests.support.waiting import wait_until


class FakePolicy(BudgetDecider):
    """Gives no budget while a request is inside, and `budget` otherwise; records its calls."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits) -> None:
        self.targets = targets
        self.heard: list[tuple[Any, ...]] = []
        self.inside: set[str] = set()
        self.seen = self.others = 0
        self.budget = (100, 10)
        self.lasts_s = 60.0
        self.held_s = 0.0

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        self.heard.append(("arrived", request, prompt_tokens, streamed))
        self.inside.add(request)

    def produced(self, now: float, request: str, tokens: int) -> None:
        self.heard.append(("produced", request, tokens))

    def ended(self, now: float, request: str, ok: bool) -> None:
        self.heard.append(("ended", request, ok))
        self.inside.discard(request)

    def elsewhere(self, now: float, inside: int) -> None:
        self.others = inside

    def observed(self, now: float, inside: int, waiting: int) -> None:
        self.seen = inside

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        self.heard.append(("stepped", tokens))

    def decide(self, now: float) -> BudgetDecision:
        self.heard.append(("decide",))
        if self.inside or self.seen:
            return BudgetDecision(Budget(), "reclaimed", 0.0, now + 60)
        return BudgetDecision(Budget(*self.budget, now + self.lasts_s), "idle", -1.0, now + self.lasts_s / 2)

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        return self.held_s if stepping_since else 0.0

    def learnt(self, now: float) -> LearntCosts:
        return LearntCosts()

    def pays(self, now: float, wake_s: float) -> bool:
        return True


class Scene:
    def __init__(self, folder: Path, **targets: LatencyTargets) -> None:
        self.made: list[FakePolicy] = []
        self.folder = folder
        self.borrowers = BorrowerTable(folder, MemoryBudget())
        deciders = MultiModelGovernor(self.make, {"": LatencyTargets(), **targets}, StepLimits())
        self.keeper = BudgetKeeper(deciders, self.borrowers, SloStats(time.monotonic()))

    def make(self, targets: LatencyTargets, limits: StepLimits) -> FakePolicy:
        self.made.append(FakePolicy(targets, limits))
        return self.made[-1]

    def engine(self, worker_id: str = "w") -> Page:
        """The page of a borrower with a lease."""
        page = Page(page_path(self.folder, worker_id), create=True)
        page.enter(os.getpid(), 8)
        page.renew(time.monotonic() + 600)
        self.borrowers.join(Hello(protocol_version=GRANTS_VERSION, worker_id=worker_id, slots=64, step_tokens=256))
        return page

    def arrive(self, request: str, model: str = "", *, streamed: bool = True) -> None:
        self.keeper.arrived(request, model, 7, time.monotonic(), streamed)


@pytest.fixture
async def scene(tmp_path: Path) -> Iterator[Scene]:  # type: ignore[misc]
    made = Scene(tmp_path)
    made.keeper.review()
    yield made
    made.keeper.close()


async def test_an_arrival_is_written_before_anything_else_is_done_for_it(scene: Scene) -> None:
    engine = scene.engine()
    assert engine.budget().tokens == 100
    scene.arrive("a")
    assert not engine.budget().tokens
    scene.keeper.ended("a", True, time.monotonic())
    await wait_until(lambda: engine.budget().tokens)


async def test_a_budget_is_decided_anew_before_it_runs_out(scene: Scene) -> None:
    scene.made[0].lasts_s = 0.05
    engine = scene.engine()
    until = engine.budget().until
    await wait_until(lambda: engine.budget().until > until + 0.1)


async def test_several_borrowers_share_one_budget_and_those_without_work_leave_theirs(scene: Scene) -> None:
    scene.made[0].budget = (101, 10)
    engines = [scene.engine("a"), scene.engine("b")]
    assert [engine.budget().tokens for engine in engines] == [51, 50]
    assert [engine.budget().sequences for engine in engines] == [5, 5]
    scene.borrowers.record_report(scene.borrowers.all()[0], BorrowerReport(wanted=False))
    assert [engine.budget().tokens for engine in engines] == [0, 101]
    scene.borrowers.record_report(scene.borrowers.all()[1], BorrowerReport(wanted=False))
    assert [engine.budget().tokens for engine in engines] == [51, 50]


async def test_without_sight_of_the_traffic_there_is_no_budget(scene: Scene) -> None:
    engine = scene.engine()
    scene.keeper.lose_sight()
    assert not engine.budget().tokens
    scene.keeper.review()
    assert not engine.budget().tokens
    scene.keeper.observed(0, 0, time.monotonic())
    assert engine.budget().tokens


async def test_an_observation_that_is_not_renewed_is_none(scene: Scene) -> None:
    engine = scene.engine()
    scene.keeper.observed(0, 0, time.monotonic(), holds_s=0.05)
    assert engine.budget().tokens
    await wait_until(lambda: not engine.budget().tokens)
    assert scene.keeper.decision.state == "blind"
    scene.keeper.observed(0, 0, time.monotonic(), holds_s=60.0)
    assert engine.budget().tokens


async def test_the_governor_hears_of_each_step(scene: Scene) -> None:
    engine = scene.engine()
    engine.begin_step()
    engine.end_step(5)
    await wait_until(lambda: ("stepped", 5) in scene.made[0].heard)


async def test_a_step_that_was_stopped_in_its_midst_teaches_nothing(scene: Scene) -> None:
    engine = scene.engine()
    engine.begin_step()
    (loan,) = scene.borrowers.all()
    loan.account.strikes.append(time.monotonic())
    engine.end_step(5)
    engine.begin_step()
    engine.end_step(6)
    await wait_until(lambda: loan.account.gpu_s)
    engine.begin_step()
    engine.end_step(7)
    await wait_until(lambda: ("stepped", 7) in scene.made[0].heard)
    assert [one for one in scene.made[0].heard if one[0] == "stepped"] == [("stepped", 7)]


async def test_events_of_one_turn_are_decided_once(scene: Scene) -> None:
    for name in "abc":
        scene.arrive(name)
    scene.made[0].heard.clear()
    for name in "abc":
        scene.keeper.produced(name, 1, time.monotonic())
    await asyncio.sleep(0)
    assert scene.made[0].heard.count(("decide",)) == 1


async def test_an_answer_in_one_piece_has_no_first_token(scene: Scene) -> None:
    scene.arrive("a", streamed=False)
    scene.keeper.produced("a", 1, time.monotonic())
    scene.keeper.ended("a", True, time.monotonic())
    assert [one for one in scene.made[0].heard if one[0] in {"arrived", "produced", "ended"}] == [
        ("arrived", "a", 7, False),
        ("ended", "a", True),
    ]


async def test_a_request_is_held_until_the_step_under_way_ends_and_no_longer_than_that_pays(scene: Scene) -> None:
    engine = scene.engine()
    scene.made[0].held_s = 5.0
    assert engine.begin_step().tokens
    scene.arrive("a")
    held = scene.keeper.ready("a")
    assert held is not None
    waiting = asyncio.ensure_future(held)
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.end_step(1)
    await asyncio.wait_for(waiting, 1.0)
    assert scene.keeper.ready("a") is None
    scene.made[0].held_s = 0.01
    engine.begin_step(heeding=False)
    held = scene.keeper.ready("a")
    assert held is not None
    await asyncio.wait_for(asyncio.ensure_future(held), 1.0)


async def test_each_model_has_its_own_governor_and_rollouts_may_do_what_all_allow(tmp_path: Path) -> None:
    scene = Scene(tmp_path, big=LatencyTargets(ttft_s=1.0))
    scene.keeper.review()
    try:
        engine = scene.engine()
        other, big = scene.made
        other.budget, big.budget = (100, 4), (30, 9)
        scene.keeper.review()
        assert (engine.budget().tokens, engine.budget().sequences) == (30, 4)
        scene.arrive("a", "big")
        assert not engine.budget().tokens
        assert ("arrived", "a", 7, True) in big.heard
        assert ("arrived", "a", 7, True) not in other.heard
        assert big.targets.ttft_s == 1.0
        assert (other.others, big.others) == (1, 0)
        scene.keeper.ended("a", True, time.monotonic())
        assert (other.others, big.others) == (0, 0)
    finally:
        scene.keeper.close()


async def test_a_keeper_that_was_closed_writes_nothing_more(scene: Scene) -> None:
    engine = scene.engine()
    scene.keeper.close()
    assert not engine.budget().tokens
    scene.keeper.ended("a", True, time.monotonic())
    scene.keeper.review()
    assert not engine.budget().tokens
