"""Leaves out parts of Ebbtide's dispatch, so that comparisons show what each of them is worth."""

from collections.abc import Iterator
from math import inf
from typing import Final

from msgspec.structs import replace

from benchmarks.rivals.changed_rounds import (
    NO_WAITING_MOVES,
    ChangedDecider,
    Replaced,
    learning,
    moving,
    placing,
    reading,
)
from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.move_costs import COSTS
from ebbtide.scheduling.dispatch.placement import pending_limit
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.dispatch.turns.prefill_speed import PrefillSpeed
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


class ContextBlind(WorkerThroughput):
    """Contexts do not count."""

    def _learn_slope(self, slowdown: float, further: float, seconds: float) -> None:
        pass


class UnlearntPrefill(PrefillSpeed):
    """Knows nothing but what is assumed: as if all engines read alike."""

    def observe(self, reads: int, tokens: int, seconds: float) -> None:
        pass


class AblatedPolicy(EbbtidePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide without those parts that are false. It is told what Ebbtide is told, or less.

    Without `delays` all rollouts go to engines at once. Then the pool's `slots` should be more than the sequences that
    its engine runs, so that rollouts wait in the engine.
    """

    keeps: bool = True  # what a lost worker had stored goes on elsewhere
    delays: bool = True  # a worker holds few rollouts that have not started
    balances: bool = True  # rollouts move
    unstarted: bool = True  # so do those that have not started (rule i)
    beyond_plateau: bool = True  # and those that run (rule ii)
    learns: bool = True  # workers' speeds are known, by the number of rollouts
    weighs_contexts: bool = True  # and by their contexts
    learns_prefill: bool = True  # how fast each worker reads prompts is known
    weighs_costs: bool = True  # a move must gain more than it costs

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return ChangedDecider(coordinator, tuple(self._parts()), balance=self.balances, keeps=self.keeps)

    def _parts(self) -> Iterator[Replaced]:
        """Those under which the missing parts do nothing."""
        costs = COSTS if self.weighs_costs else FREE_MOVES
        costs = costs if self.beyond_plateau else replace(costs, advantage=inf)
        yield from moving(costs)
        yield placing(costs=costs, pending_limit=pending_limit if self.delays else _slots)
        if not self.unstarted:
            yield NO_WAITING_MOVES
        if not (self.learns and self.weighs_contexts):
            yield learning(ContextBlind if self.learns else UnlearntSpeed)
        if not self.learns_prefill:
            yield reading(UnlearntPrefill)


def _slots(host: HostView) -> int:
    return host.slots
