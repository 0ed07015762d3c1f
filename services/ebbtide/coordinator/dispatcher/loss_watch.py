"""Learns how often workers of each pool are lost, from those that are no longer attached.

Invariant: `_there` has the workers of the last look, and `_away` those that left since and may come again under their
name: a worker that attaches again soon was not lost. One that people asked to leave was not lost either. While no
worker is attached, none is counted as lost: the link to all of them may be cut. Lost with the process: the rates are
learnt again.
"""

from collections import Counter
from collections.abc import Collection
from math import inf
from typing import Final, NamedTuple

from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.mixed_fleet.loss_rates import LossRates, Pool

#: Seconds without a token until the rollouts of a worker that was lost without notice are queued: some heartbeats.
FOUND_S: Final = 5.0
#: Rates change over hours.
_LOOK_EVERY_S: Final = 1.0
#: A worker that is away for longer is lost.
_AWAY_S: Final = 10.0
#: A look after a longer pause than this learns nothing: workers may have come and gone unseen.
_BLIND_S: Final = 30.0
#: Reasons to drain of workers that people asked: as the coordinator notes it, and as the worker says it then.
_ON_REQUEST: Final = frozenset({"asked to leave", "asked"})


class _Left(NamedTuple):
    pool: Pool
    at: float


class LossWatch:
    def __init__(self) -> None:
        self._rates = LossRates()
        self._there: dict[str, tuple[Pool, bool]] = {}  # whether it was asked to leave
        self._away: dict[str, _Left] = {}
        self._looked = -inf

    def look(self, sessions: Collection[WorkerSession], now: float) -> None:
        """Learn from the workers that are attached now."""
        seconds = now - self._looked
        if seconds < _LOOK_EVERY_S:
            return
        there = {one.worker_id: (_pool(one), one.reason in _ON_REQUEST) for one in sessions}
        if seconds <= _BLIND_S:
            self._learn(there, now, seconds)
        else:
            self._away.clear()
        self._there, self._looked = there, now

    def _learn(self, there: dict[str, tuple[Pool, bool]], now: float, seconds: float) -> None:
        left = {
            name: _Left(pool, now) for name, (pool, asked) in self._there.items() if name not in there and not asked
        }
        away = {name: one for name, one in (self._away | left).items() if name not in there}
        if not there:
            away = {name: one._replace(at=now) for name, one in away.items()}
        lost = Counter(one.pool for one in away.values() if now - one.at >= _AWAY_S)
        self._away = {name: one for name, one in away.items() if now - one.at < _AWAY_S}
        workers = Counter(pool for pool, _ in there.values())
        for pool in sorted({*workers, *lost, *self._rates.pools}):
            self._rates.observe(pool, workers=workers[pool], lost=lost[pool], seconds=seconds)

    def spell_s(self, session: WorkerSession) -> float:
        """For how long the worker will stay on average, in seconds; inf: it is practically never lost."""
        return self._rates.spell_s(_pool(session))


def _pool(session: WorkerSession) -> Pool:
    return Pool(session.hello.kind, session.hello.site)
