"""No guard at all: the rollout engine always has its whole budget. What a shared GPU is without a rule, but for memory:
rollouts have the four fifths of it that others give them too."""

from benchmarks.pair.rivals import run_rival
from ebbtide.scheduling.coserving.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.loans.memory_budget import AllowedMemory, MemoryBudget
from ebbtide.types.grants import GRANT_S, BorrowerReport, Budget, Forecast, Hello, Residency


class Always(BudgetDecider):
    """Implements `BudgetDecider`, and listens to nothing."""

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
        return LearntCosts(forecast=Forecast(share=1.0, spell_s=3600.0))

    def pays(self, now: float, wake_s: float) -> bool:
        return True


class Fixed(MemoryBudget):
    """A share of the memory that stays as it is."""

    def joined(self, worker_id: str, hello: Hello) -> None:
        self._kv = min(hello.kv_bytes, int(0.8 * self.limit)) if self.limit else hello.kv_bytes

    def left(self, worker_id: str) -> None: ...

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...

    def tokens_inside(self, now: float, tokens: int) -> None: ...

    def allowed(self, now: float, worker_id: str, *, idle_s: float) -> AllowedMemory:
        return AllowedMemory(self._kv, "normal", Residency.AWAKE)


if __name__ == "__main__":
    run_rival(Always, Fixed, __doc__ or "")
