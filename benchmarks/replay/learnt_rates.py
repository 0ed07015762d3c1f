"""Learns how fast workers are, as the coordinator did before its rule of balancing was written anew (commit 95636729).

`migrate_only` places by it, so that what balancing gains is always compared with the same policy. A worker's speed is
learnt from pairs of heartbeats between which it only generated. At loads at which it was not seen it counts as its
kind, which here are all workers; so does one that was seen to be nearly as fast.
"""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.forecasts.engine_pace import fitted_pace
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import WorkerState
from ebbtide.types.remaining_work import EnginePace

#: Between two looks at heartbeats, and between two fits of the kind's pace.
_LOOK_S: Final = 0.25
_FIT_S: Final = 2.0
#: A span teaches nothing if it was looked at less often than this, or is longer than that,
_BLIND_S: Final = 0.5
_LONGEST_S: Final = 10.0
#: if so large a share of the rollouts began or ended in it, or so large a share at its end passed without a token,
_CHURN: Final = 0.25
_QUIET: Final = 0.5
#: or if a message waited so long for the store.
_STORING_S: Final = 0.25
#: A rate that is so near to a typical worker's counts as that.
_ALIKE: Final = 0.15
#: Workers, evenly picked, that stand for a larger kind.
_SAMPLE: Final = 64


class _Pace(Struct, frozen=True):
    """How fast workers are, between the `fewest` and the `most` rollouts at which any was seen."""

    pace: EnginePace
    fewest: float
    most: float

    def rate(self, running: float, context: float) -> float:
        seen = min(max(running, self.fewest), self.most)
        return min(1.0, seen / running) / self.pace.seconds(seen, context)


def _fitted(speeds: Sequence[WorkerThroughput]) -> _Pace | None:
    """The pace of all workers; None while nothing was seen of any."""
    points = [point for speed in speeds[:: -(-len(speeds) // _SAMPLE) or 1] for point in speed.points()]
    loads = [point.running for point in points]
    return _Pace(fitted_pace(points), min(loads), max(loads)) if points else None


class _Beat(Struct):
    """A heartbeat, and the attempts that ran then."""

    beat: HeartbeatReport
    running: frozenset[str]
    disturbed: bool  # since then something held the worker up


class LearntRates:
    """`lessons`: how often the plateaus and contexts of each session were learnt, and `lesson` the typical speeds: what
    was derived of them before is old.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, WorkerThroughput] = {}  # these by session, too
        self._beats: dict[str, _Beat] = {}
        self._contexts: dict[str, float] = {}
        self.plateaus: dict[str, int] = {}
        self.lessons: dict[str, int] = {}
        self.lesson = 0
        self._context = 0.0  # the mean of `_contexts`
        self._rates: dict[tuple[str, int], float] = {}  # of this round; "": of a typical worker
        self._pace: _Pace | None = None
        self._fitted_at = self._next = -inf

    def learn(self, sessions: Mapping[str, WorkerSession], now: float) -> bool:
        """Learn from the heartbeats of all sessions, if it is time for that. Returns whether it was."""
        if now < self._next:
            return False
        blind, self._next = now - self._next > _BLIND_S, now + _LOOK_S
        for session in sessions.values():
            self._observe(session, disturbed=blind or _disturbed(session, now))
        for kept in (self._speeds, self._beats, self._contexts, self.plateaus, self.lessons):
            for gone in kept.keys() - sessions.keys():
                del kept[gone]
        self._context = sum(self._contexts.values()) / max(1, len(self._contexts))
        self._rates.clear()
        if now - self._fitted_at >= _FIT_S:
            self._fitted_at = now
            self._pace = _fitted([self._speeds[name] for name in sessions if name in self._speeds]) or self._pace
        self.lesson += 1
        return True

    def knows(self, session: WorkerSession) -> bool:
        """Whether the worker's own speed is known."""
        speed = self._speeds.get(session.session_id)
        return speed is not None and speed.rate(1.0, 0.0) > 0.0

    def rate(self, session: WorkerSession) -> float:
        """Tokens/s of each of its rollouts with one more; 0.0 while no worker is known."""
        running, name = len(session.attempts) + 1, session.session_id
        found = self._rates.get((name, running))
        if found is None:
            found, typical = self._own(name, running), self._typical(running)
            if not found or abs(found - typical) <= _ALIKE * typical:
                found = typical
            self._rates[name, running] = found
        return found

    def _own(self, name: str, running: int) -> float:
        """What a worker is expected to do: as it was seen, and at other loads as its kind makes probable."""
        own, pace = self._speeds.setdefault(name, WorkerThroughput()), self._pace
        context = self._contexts.get(name, 0.0)
        seen = own.rate(running, context)
        if not seen:
            return pace.rate(running, context) if pace is not None else 0.0
        fewest, most = own.span
        edge = min(max(running, fewest), most)
        if pace is None or edge == running or not edge:
            return seen
        return own.rate(edge, context) * pace.rate(running, context) / pace.rate(edge, context)

    def _typical(self, running: int) -> float:
        if self._pace is not None:
            return self._pace.rate(running, self._context)
        found = self._rates.get(("", running))
        if found is None:
            known = list(self._speeds.values())[:: -(-len(self._speeds) // _SAMPLE) or 1]
            rates = [rate for speed in known if (rate := speed.rate(running, self._context))]
            found = self._rates["", running] = median(rates) if rates else 0.0
        return found

    def _observe(self, session: WorkerSession, *, disturbed: bool) -> None:
        """Learn a worker's speed from two heartbeats, if it only generated between them."""
        name, beat = session.session_id, session.beat
        last = self._beats.get(name)
        if last is not None:
            last.disturbed |= disturbed
            if last.beat is beat:
                return
        running = frozenset(session.attempts.keys() - session.pending.keys())
        self._beats[name] = _Beat(beat, running, disturbed)
        context = self._contexts[name] = _context(session)
        self.lessons[name] = self.lessons.get(name, 0) + 1
        if last is None or last.disturbed or not running or not last.running:
            return
        seconds, busy_s = beat.uptime_s - last.beat.uptime_s, beat.busy_s - last.beat.busy_s
        churn = len(running ^ last.running) + len(session.pending)
        steady = busy_s >= 0.9 * seconds and beat.quiet_s <= _QUIET * seconds
        if not 0 < seconds <= _LONGEST_S or churn > _CHURN * len(running) or not steady:
            return
        speed = self._speeds.setdefault(name, WorkerThroughput())
        tokens = beat.tokens_generated - last.beat.tokens_generated
        speed.observe((len(running) + len(last.running)) / 2, context, tokens, seconds)
        self.plateaus[name] = speed.plateau(context)


def _disturbed(session: WorkerSession, now: float) -> bool:
    """Whether the worker is held up now: it is held, installs, or waits for the store."""
    stored_late = session.append_stream.storing > 0 and now - session.append_stream.progressed > _STORING_S
    return session.beat.held or session.state is WorkerState.INSTALLING or stored_late


def _context(session: WorkerSession) -> float:
    """Mean tokens of prompt and response of the worker's rollouts."""
    return sum(one.length for one in session.attempts.values()) / max(1, len(session.attempts))
