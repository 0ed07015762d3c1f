"""Holds the parameters of the rules that a dispatcher's round calls."""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts
from ebbtide.scheduling.dispatch.placement import pending_limit
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.dispatch.turns.turn_routing import TERMS, TurnTerms


class DispatchRules(Struct, frozen=True, kw_only=True):
    """The coordinator keeps to the defaults; comparisons change them. See `place`, `rebalance`, `WorkerThroughput`."""

    pending_limit: Callable[[HostView], int] = pending_limit
    costs: MoveCosts = COSTS
    turns: TurnTerms = TERMS
    unstarted: bool = True  # rollouts that wait in an engine may move
    new_speed: Callable[[], WorkerThroughput] = WorkerThroughput  # of a worker of which nothing is known


RULES: Final = DispatchRules()
