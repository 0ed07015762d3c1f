"""Leaves out parts of Ebbtide's dispatch, so that comparisons show what each of them is worth."""

from collections.abc import Iterator
from math import inf
from typing import Final

from msgspec.structs import replace

from benchmarks.rivals.changed_rounds import ChangedDecider, Replaced, learning, placing
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.move_costs import COSTS
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Moves that cost nothing and must gain nothing.
FREE_MOVES: Final = replace(
    COSTS,
    prefill_tokens_per_s=inf,
    handover_s=0.0,
    margin=0.0,
    advantage=1.0,
    sooner=1.0,
    least_part=0.0,
    least_stay_s=0.0,
)
#: Tokens/s of an engine in which all rollouts share them. Its amount does not matter: all engines have the same.
_SHARED: Final = 1_000.0


class UnlearntSpeed(WorkerThroughput):
    """Knows no plateau: as if each engine made as much with one rollout as with many."""

    def rate(self, running: float, context: float) -> float:  # noqa: ARG002
        return _SHARED / max(1.0, running)

    def plateau(self, context: float) -> int:  # noqa: ARG002
        return 0


class AblatedPolicy(EbbtidePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide without those parts that are false. It is told what Ebbtide is told, or less.

    Without `delays` all rollouts go to engines at once. Then the pool's `slots` should be more than the sequences that
    its engine runs, so that rollouts wait in the engine.
    """

    keeps: bool = True  # what a lost worker had stored goes on elsewhere
    delays: bool = True  # a worker holds few rollouts that have not started
    balances: bool = True  # rollouts move
    learns: bool = True  # workers' speeds are known, by the number of rollouts

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return ChangedDecider(coordinator, tuple(self._parts()), balance=self.balances, keeps=self.keeps)

    def _parts(self) -> Iterator[Replaced]:
        """Those under which the missing parts do nothing."""
        if not self.delays:
            yield placing(pending_limit=lambda host: host.slots)
        if not self.learns:
            yield learning(UnlearntSpeed)
