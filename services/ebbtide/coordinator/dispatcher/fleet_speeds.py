"""Keeps how fast each worker decodes, learnt from all workers of its kind.

Workers are of one kind if their engines name the same device and architecture; those that name no device are of one
kind together. A worker of a kind of which nothing was seen counts as one of any kind.

Invariant: `_kinds` has the kinds that were seen, at most `_MOST` of them; `_curves` those of attached workers, made
since the last `fit`. Lost with the process, with the speeds.
"""

from collections.abc import Generator, Iterable, Mapping
from math import inf
from typing import Final

from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.speed_curves import KindCurve, SeenEngine, SpeedCurve
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput

#: Speeds change little, and a fit looks at all that was seen of a sample of workers.
_EVERY_S: Final = 5.0
#: Kinds that are remembered. Workers name their devices freely, and the list must not grow without end.
_MOST: Final = 256


class FleetSpeeds:
    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], KindCurve] = {}
        self._any: KindCurve | None = None  # of all workers, once `_asked_any`
        self._asked_any = False
        self._curves: dict[str, SpeedCurve] = {}
        self._seen: dict[str, SeenEngine] = {}
        self._fitted, self._outdated = -inf, False

    def note_first(self) -> None:
        """Note that a worker was seen for the first time: what is known of it counts from the next `fit` on."""
        self._outdated = True

    def fit(
        self,
        sessions: Iterable[WorkerSession],
        speeds: Mapping[str, WorkerThroughput],
        contexts: Mapping[str, float],
        now: float,
    ) -> Generator[None, None, bool]:
        """Fit anew every few seconds, or once a worker was seen for the first time; returns whether it did. It yields
        after each kind, so that others have their turn in between: until the end the former curves hold.

        `speeds`: by worker; `contexts`: mean tokens of the rollouts, by session. A kind whose workers left is
        remembered: a market that takes machines back gives like ones again.
        """
        if now - self._fitted < _EVERY_S and not self._outdated:
            return False
        self._outdated = False
        self._fitted = now
        kinds: dict[tuple[str, str], list[SeenEngine]] = {}
        seen: dict[str, SeenEngine] = {}
        for session in sessions:
            context = contexts.get(session.session_id) if session.attempts else None
            engine = seen[session.session_id] = SeenEngine(speeds.get(session.worker_id), context)
            kinds.setdefault(self._kind(session), []).append(engine)
        found = dict[tuple[str, str], KindCurve]()
        for kind, some in kinds.items():
            if (curve := KindCurve.learnt(some)) is not None:
                found[kind] = curve
                yield
        self._seen = seen
        self._curves.clear()
        for kind, curve in found.items():
            self._kinds.pop(kind, None)  # those seen last are forgotten last
            self._kinds[kind] = curve
        while len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]
        self._any, self._asked_any = None, False
        return True

    def curve(self, session: WorkerSession) -> SpeedCurve | None:
        """How fast the worker is at each load; None while nothing is known of any."""
        found = self._curves.get(session.session_id)
        if found is None and (kind := self._kinds.get(self._kind(session)) or self._anyone()) is not None:
            engine = self._seen.get(session.session_id) or SeenEngine(None, None)
            found = self._curves[session.session_id] = kind.of(engine)
        return found

    def _anyone(self) -> KindCurve | None:
        """A worker of any kind, as far as one was seen."""
        if not self._asked_any:
            self._asked_any = True
            self._any = KindCurve.learnt(list(self._seen.values())) or next(reversed(self._kinds.values()), None)
        return self._any

    def _kind(self, session: WorkerSession) -> tuple[str, str]:
        engine = session.hello.engine
        return engine.device, engine.architecture if engine.device else ""
