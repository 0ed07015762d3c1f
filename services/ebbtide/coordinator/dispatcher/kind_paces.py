"""Keeps the pace of each kind of workers, fitted to what was learnt of them.

Workers are of one kind if their engines name the same device and architecture. Those that name no device are of no
kind: how fast one of them is says little about another.

Invariant: `_paces` has the kinds that were seen, at most `_KINDS` of them. Lost with the process, with the speeds.
"""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.mixed_fleet.kind_pace import KindPace, kind_pace
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput

#: Paces change little, and a fit looks at all points of a sample of workers.
_EVERY_S: Final = 2.0
#: Kinds that are remembered. Workers name their devices freely, and the list must not grow without end.
_KINDS: Final = 256


class KindPaces:
    def __init__(self) -> None:
        self._paces: dict[tuple[str, str], KindPace] = {}
        self._fitted = -inf

    def pace(self, session: WorkerSession) -> KindPace | None:
        """The pace of the worker's kind; None while none is known."""
        engine = session.hello.engine
        return self._paces.get((engine.device, engine.architecture))

    def fit(self, sessions: Iterable[WorkerSession], speeds: Mapping[str, WorkerThroughput], now: float) -> None:
        """Fit the paces again every few seconds. `speeds`: by worker id.

        A kind whose workers left is remembered: a market that takes machines back gives like ones again.
        """
        if now - self._fitted < _EVERY_S:
            return
        self._fitted = now
        kinds: dict[tuple[str, str], list[WorkerThroughput]] = {}
        for session in sessions:
            engine, speed = session.hello.engine, speeds.get(session.worker_id)
            if engine.device and speed is not None:
                kinds.setdefault((engine.device, engine.architecture), []).append(speed)
        self._paces |= {kind: pace for kind, known in kinds.items() if (pace := kind_pace(known)) is not None}
        while len(self._paces) > _KINDS:
            del self._paces[next(iter(self._paces))]
