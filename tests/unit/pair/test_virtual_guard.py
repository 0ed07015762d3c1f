"""The guard in virtual time calls its policies as the live one does."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pair.virtual import virtual_guard
from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.serving_policies import ConstantBudget
from benchmarks.pair.virtual.virtual_guard import VirtualGuard
from ebbtide.grants import Page, page_path
from ebbtide.rollout_worker import guard_link
from ebbtide.serving_guard import budget_keeper, server_lender
from ebbtide.serving_guard.borrowers import BorrowerTable
from ebbtide.serving_guard.budget_keeper import BudgetKeeper
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets, MultiModelGovernor, StepLimits
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.serving_guard.slo_stats import SloStats
from ebbtide.types.grants import GRANTS_VERSION, Hello

COSTS = PairCosts()
TARGETS, LIMITS = LatencyTargets(), StepLimits(tokens=32, sequences=8)


class Recorded(ConstantBudget):
    """Gives the same budget always, and notes what it is called with, but for times."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits) -> None:
        super().__init__(targets, limits)
        self.heard: list[tuple[Any, ...]] = []

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        self.heard.append(("arrived", request, prompt_tokens))

    def produced(self, now: float, request: str, tokens: int) -> None:
        self.heard.append(("produced", request, tokens))

    def ended(self, now: float, request: str, ok: bool) -> None:
        self.heard.append(("ended", request, ok))

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        self.heard.append(("stepped", tokens))

    def decide(self, now: float) -> Any:
        self.heard.append(("decide",))
        return super().decide(now)

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        self.heard.append(("hold", stepping_since is not None))
        return 0.0


@pytest.fixture
async def live(tmp_path: Path) -> list[tuple[Any, ...]]:
    """What a policy hears in the live guard: two arrivals, one of them beside a step; a token of each at once; three
    steps that are seen at one look; the end of one request."""
    made: list[Recorded] = []

    def make(targets: LatencyTargets, limits: StepLimits) -> Recorded:
        made.append(Recorded(targets, limits))
        return made[-1]

    borrowers = BorrowerTable(tmp_path, MemoryBudget())
    deciders = MultiModelGovernor(make, {"": TARGETS}, LIMITS)
    keeper = BudgetKeeper(deciders, borrowers, SloStats(time.monotonic()))
    page = Page(page_path(tmp_path, "w"), create=True)
    page.enter(os.getpid(), 8)
    page.renew(time.monotonic() + 600)
    borrowers.join(Hello(protocol_version=GRANTS_VERSION, worker_id="w", slots=8, step_tokens=32))
    made[0].heard.clear()
    keeper.arrived("a", "", 7, time.monotonic(), True)
    keeper.ready("a")
    page.begin_step()
    keeper.arrived("b", "", 9, time.monotonic(), True)
    keeper.ready("b")
    page.end_step(6)
    for tokens in (8, 10):
        page.begin_step()
        page.end_step(tokens)
    keeper.produced("a", 1, time.monotonic())
    keeper.produced("b", 1, time.monotonic())
    await asyncio.sleep(0)
    keeper._look_at_pages()
    keeper.produced("a", 1, time.monotonic())
    keeper.ended("a", True, time.monotonic())
    await asyncio.sleep(0)
    keeper.close()
    return made[0].heard


async def test_a_policy_hears_the_same_calls_in_the_same_order_as_live(live: list[tuple[Any, ...]]) -> None:
    policy = Recorded(TARGETS, LIMITS)
    guard = VirtualGuard(policy, None, COSTS)
    policy.heard.clear()
    guard.arrived(1.000, "a", 7, None)
    guard.arrived(1.001, "b", 9, 1.0005)
    for at, tokens in ((1.002, 6), (1.003, 8), (1.004, 10)):
        guard.stepped(at, tokens, 0.001)
    guard.produced(1.005, "a", last=False)
    guard.produced(1.005, "b", last=False)
    guard.decide(1.005)
    guard._look(1.010, stepping=False)
    guard.produced(1.011, "a", last=True)
    guard.decide(1.011)
    assert policy.heard == live
    assert live.count(("stepped", 8)) == 3, "the page tells the mean of the steps since the last look"


def test_the_virtual_guard_keeps_the_live_ones_pace() -> None:
    for name in ("_LOOK_S", "_WATCH_S", "_HELD_S", "_LEAST_S", "_MOST_S"):
        assert getattr(virtual_guard, name) == getattr(budget_keeper, name), name
    assert virtual_guard._TICK_S == server_lender._TICK_S
    assert virtual_guard._TICK_S * virtual_guard._TICKS_OF_REPORT == guard_link._REPORT_S


def test_a_held_request_notices_the_end_of_the_step_at_its_next_look() -> None:
    assert VirtualGuard.released(10.0042, 10.0) == pytest.approx(10.005)
    assert VirtualGuard.released(10.003, 10.0) == pytest.approx(10.003)


def test_a_budget_is_cut_to_what_the_engine_can_take() -> None:
    guard = VirtualGuard(ConstantBudget(TARGETS, StepLimits(tokens=900, sequences=900)), None, COSTS)
    assert (guard.budget.tokens, guard.budget.sequences) == (COSTS.step_tokens, COSTS.slots)


def test_a_review_is_neither_sooner_nor_later_than_the_live_guards() -> None:
    guard = VirtualGuard(ConstantBudget(TARGETS, LIMITS), None, COSTS)
    guard.fire(0.01, stepping=False)
    assert 0.0005 <= guard._review_at <= 0.1
