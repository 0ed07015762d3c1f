"""Grants rollouts the same budget and memory at all times: everything, or nothing.

A rival of the governor. Told: nothing. Not told: served requests, their SLO, and how long steps take.
"""
# ruff: noqa: ARG002 - a rival does not use all that it is told

from ebbtide.serving_guard.borrowers import AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.governor.memory import NORMAL
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import GRANT_S, BorrowerReport, Budget, Forecast, Hello, Residency

#: Rollouts keep this part of the memory, as much as ROSE gives them at most.
_SHARE = 0.8


class ConstantBudget(BudgetDecider):
    """A device that is shared without any rule; with limits of 0 tokens: serving alone."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits) -> None:
        del targets
        self._limits = limits

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None: ...

    def produced(self, now: float, request: str, tokens: int) -> None: ...

    def ended(self, now: float, request: str, ok: bool) -> None: ...

    def observed(self, now: float, inside: int, waiting: int) -> None: ...

    def stepped(self, now: float, tokens: int, seconds: float) -> None: ...

    def decide(self, now: float) -> BudgetDecision:
        budget = Budget(self._limits.tokens, self._limits.sequences, now + GRANT_S)
        return BudgetDecision(budget, "idle", NOTHING_INSIDE, now + GRANT_S / 2)

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        return 0.0

    def learnt(self, now: float) -> LearntCosts:
        granted = self._limits.tokens > 0
        return LearntCosts(forecast=Forecast(share=float(granted), spell_s=3600.0))

    def pays(self, now: float, wake_s: float) -> bool:
        return True


class ConstantMemory(MemoryBudget):
    """A share of the memory that stays as it is."""

    def joined(self, worker_id: str, hello: Hello) -> None:
        self._kv = min(hello.kv_bytes, int(_SHARE * self.limit)) if self.limit else hello.kv_bytes

    def left(self, worker_id: str) -> None: ...

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...

    def tokens_inside(self, now: float, tokens: int) -> None: ...

    def allowed(self, now: float, worker_id: str, *, idle_s: float) -> AllowedMemory:
        return AllowedMemory(self._kv, NORMAL, Residency.AWAKE)
