"""Bounds how long rollouts may delay requests by how close requests come to their target without rollouts.

A delay turns a request into a miss if the request's own latency is nearer to the target than the delay. Own latencies
vary, and they vary more while something else disturbs the machine. So the bound is the distance from the target to the
slowest requests lately that met it by themselves, except for as many as may miss. Without a disturbance it is wide.

Invariant: a request that missed by itself says nothing about rollouts, and bounds nothing. All of it is lost with the
process. Then nothing is known, and the bound is 0.
"""

from typing import Final

from ebbtide.scheduling.coserving.cost_line import RecentValues

#: At a few requests a second these are a minute: as long as a disturbance is remembered.
_MEMORY: Final = 128


class AttainmentHeadroom:
    """The bound for one latency. `allowed`: the share of requests that may miss because of rollouts."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._own = RecentValues(_MEMORY)

    def served(self, own_s: float, target_s: float, *, missed: bool) -> None:
        """A request would have taken `own_s` without rollouts. `missed`: it met its target but for them."""
        self._own.add(min(own_s, target_s) if missed else own_s)

    def within(self, target_s: float) -> float:
        """The longest delay by which few enough of the last requests would have missed this target, in seconds; 0.0
        while no request met it by itself."""
        spared = int(self._allowed * len(self._own))
        slowest = self._own.largest_within(target_s, besides=spared)
        return target_s - slowest if slowest else 0.0
