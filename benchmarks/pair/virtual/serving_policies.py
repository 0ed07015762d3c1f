"""What may decide about a served device: the guard's own governor, and the two ends beside it, all or nothing."""
# ruff: noqa: ARG002 - a constant policy does not use all that it is told

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.rollout_batch import RolloutShape
from benchmarks.pair.virtual.served_engine import ServedCall
from benchmarks.pair.virtual.serving_pair import ServingPair
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.serving_guard.borrowers import AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.governor.governor import Governor
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


class ServingPolicy(Struct, frozen=True, kw_only=True):
    """Makes the two deciders of one guard."""

    name: str
    decider: Callable[[LatencyTargets, StepLimits], BudgetDecider]
    memory: Callable[..., MemoryBudget]  # called as `serving_guard.server_lender` calls it
    aborts: bool = False  # a cut of memory aborts rollouts whole
    lends: bool = True

    def play(
        self,
        requests: Sequence[TrafficRequest],
        costs: PairCosts,
        targets: LatencyTargets,
        *,
        seed: int,
        shape: RolloutShape | None = None,
    ) -> ServingPair:
        """A pair under this policy that is ready to run."""
        memory = costs.memory
        limits = StepLimits(
            tokens=costs.step_tokens if self.lends else 0, sequences=max(costs.slots, 1) if self.lends else 0
        )
        divides = self.memory(
            limit_mib=memory.limit_mib,
            serving_kv_mib=min(memory.serving_kv_mib, memory.limit_mib) if memory.limit_mib else memory.serving_kv_mib,
            bytes_per_token=memory.served_token_bytes,
        )
        return ServingPair(
            requests,
            costs,
            self.decider(targets, limits),
            memory=divides,
            aborts=self.aborts,
            shape=shape,
            seed=seed,
        )


#: Rollouts never run, and always.
ALONE: Final = ServingPolicy(name="alone", decider=ConstantBudget, memory=ConstantMemory, lends=False)
UNGUARDED: Final = ServingPolicy(name="unguarded", decider=ConstantBudget, memory=ConstantMemory)
OURS: Final = ServingPolicy(name="ours", decider=Governor, memory=MemoryBudget)


def played_alone(requests: Sequence[TrafficRequest], costs: PairCosts, *, seed: int = 0) -> ServingPair:
    """Serving without rollouts."""
    pair = ALONE.play(requests, costs, LatencyTargets(), seed=seed)
    pair.run()
    return pair


def resolved_targets(slo: LatencyTargets, alone: Sequence[ServedCall]) -> LatencyTargets:
    """The targets in seconds; factors are on the percentile of serving alone."""
    ttft = latency_percentile(served_ttft(alone), slo.percentile)
    tpot = latency_percentile(served_tpot(alone), slo.percentile)
    return replace(slo, ttft_s=slo.ttft_s or slo.ttft_factor * ttft, tpot_s=slo.tpot_s or slo.tpot_factor * tpot)


def latency_percentile(values: Sequence[float], at: float) -> float:
    """The percentile (0 to 100) between two values in proportion; 0.0 without values."""
    return float(np.percentile(values, at)) if len(values) else 0.0


def served_ttft(calls: Sequence[ServedCall]) -> list[float]:
    """Seconds to the first token."""
    return [one.ttft_s for one in calls]


def served_tpot(calls: Sequence[ServedCall]) -> list[float]:
    """Mean seconds of each later token, of requests that have any."""
    return [one.tpot_s for one in calls if one.made > 1]
