"""Learns how often workers of each pool are lost: losses over the time for which its workers were there.

A pool is all workers of one kind at one site. Spot markets change within hours, so older losses fade. A pool of which
little was seen is taken for a usual one of its kind.

Invariant: `_seen` has the faded losses and worker-seconds of at most `_POOLS` pools, both from the same time. Lost with
the process; hours of a fleet teach them again.
"""

from collections.abc import Collection
from math import exp, inf
from typing import Final, NamedTuple

from ebbtide.types.fleet import WorkerKind

#: Losses and time of so long ago count a third.
_MEMORY_S: Final = 4 * 3600.0
#: What is assumed weighs as much as so long a time of one worker.
_ASSUMED_S: Final = 3600.0
#: Seconds between two losses of one usual spot worker. Recorded fleets of two clouds (`p3` and `g4dn` of Bamboo,
#: NSDI 2023) have a median life of an hour; calmer markets are more common.
_SPOT_SPELL_S: Final = 3 * 3600.0
#: Workers that stay longer than this on average count as never lost.
_STEADY_S: Final = 7 * 24 * 3600.0
#: Pools that are remembered. Workers name their sites freely, and the list must not grow without end.
_POOLS: Final = 256


class Pool(NamedTuple):
    kind: WorkerKind
    site: str


class LossRates:
    def __init__(self) -> None:
        self._seen: dict[Pool, tuple[float, float]] = {}  # losses, worker-seconds

    @property
    def pools(self) -> Collection[Pool]:
        """Those that are remembered."""
        return self._seen.keys()

    def observe(self, pool: Pool, *, workers: int, lost: int, seconds: float) -> None:
        """Learn that of so many workers so many were lost within `seconds`. Call it for all `pools`: what was seen of
        one without workers fades, too.
        """
        losses, there_s = self._seen.get(pool, (0.0, 0.0))
        fade = exp(-seconds / _MEMORY_S)
        self._seen[pool] = (fade * losses + lost, fade * there_s + workers * seconds)
        if len(self._seen) > _POOLS:
            del self._seen[min(self._seen, key=lambda one: self._seen[one][1])]

    def spell_s(self, pool: Pool) -> float:
        """For how long a worker of the pool stays on average, in seconds; inf: it is practically never lost."""
        losses, there_s = self._seen.get(pool, (0.0, 0.0))
        assumed = _ASSUMED_S / _SPOT_SPELL_S if pool.kind is WorkerKind.SPOT else 0.0
        rate = (losses + assumed) / (there_s + _ASSUMED_S)
        return 1.0 / rate if rate * _STEADY_S > 1.0 else inf
