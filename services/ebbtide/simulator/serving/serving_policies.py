"""What may decide about a served device: the guard's own governor, and the two ends beside it."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.serving_guard.governor.budget_decider import BudgetDecider, LatencyTargets, StepLimits
from ebbtide.serving_guard.governor.governor import Governor
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.simulator.serving.constant_policy import ConstantBudget, ConstantMemory
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.rollout_batch import RolloutShape
from ebbtide.simulator.serving.serving_pair import PairObserver, ServingPair


class ServingPolicy(Struct, frozen=True, kw_only=True):
    """Makes the two deciders of one guard."""

    name: str
    decider: Callable[[LatencyTargets, StepLimits], BudgetDecider]
    memory: Callable[..., MemoryBudget]  # called as `serving_guard.server_mode` calls it
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
        observer: PairObserver | None = None,
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
            observer=observer,
        )


#: Rollouts never run, and always.
ALONE: Final = ServingPolicy(name="alone", decider=ConstantBudget, memory=ConstantMemory, lends=False)
UNGUARDED: Final = ServingPolicy(name="unguarded", decider=ConstantBudget, memory=ConstantMemory)
OURS: Final = ServingPolicy(name="ours", decider=Governor, memory=MemoryBudget)
