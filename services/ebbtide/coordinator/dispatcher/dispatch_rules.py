"""Holds the parameters of the rules that a dispatcher's round calls."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts
from ebbtide.scheduling.dispatch.placement import Placement, pending_limit
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.dispatch.turns.prefill_speed import PrefillSpeed
from ebbtide.scheduling.dispatch.turns.turn_routing import TERMS, TurnTerms

if TYPE_CHECKING:
    from ebbtide.coordinator.state.run_state import RunState
    from ebbtide.coordinator.state.worker_session import WorkerSession


def _unknown_speed(_: str) -> WorkerThroughput:
    return WorkerThroughput()


class DispatchRules(Struct, frozen=True, kw_only=True):
    """The coordinator keeps to the defaults; comparisons change them. See `place`, `rebalance`, `WorkerThroughput`."""

    pending_limit: Callable[[HostView], int] = pending_limit
    costs: MoveCosts = COSTS
    turns: TurnTerms = TERMS
    unstarted: bool = True  # rollouts that wait in an engine may move
    new_speed: Callable[[str], WorkerThroughput] = _unknown_speed  # of a worker, by name, of which nothing is known
    kinds: bool = True  # a worker of which little is known is taken to be like others of its kind
    memory: bool = True  # workers offer as many slots as their memory holds rollouts
    losses: bool = True  # likely losses of workers count
    new_prefill: Callable[[float], PrefillSpeed] = PrefillSpeed  # of prompts; handed the tokens/s that are assumed
    #: What places queued rollouts on a run's workers instead of `place`, now; for comparisons of live fleets.
    rival: "Callable[[RunState, Sequence[WorkerSession], float], list[Placement] | None] | None" = None


RULES: Final = DispatchRules()
