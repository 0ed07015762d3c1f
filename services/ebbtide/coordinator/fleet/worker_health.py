"""Finds workers to give up: silent ones, those that stopped generating, and those that keep what was asked back.

Invariant: exactly the attached sessions are watched. Lost with the process: workers attach again, and all are trusted.
"""

from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

from ebbtide.coordinator.rules.liveness import JUDGE_EVERY_S, Liveness
from ebbtide.coordinator.rules.overload import HeartbeatDelay
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.health.token_progress import FLOOR_S, PAUSE_S, TokenProgress, WorkerActivity

#: A worker that hands back nothing for so long, though asked several times, is stuck.
_OBEYS_S: Final = 45.0
#: Least share of its time that a borrowed worker is assumed to have.
_LEAST_SHARE: Final = 0.05


class SuspectWorker(NamedTuple):
    session_id: str
    reason: str
    quiet_s: float  # since its last sign of life, or of work


class WorkerHealth:
    def __init__(self, heartbeat_timeout_s: float, heartbeat_s: float = 1.0) -> None:
        #: Often enough to tell a worker's silence from our own sleep, and at most a tenth late.
        self.judge_every_s = min(JUDGE_EVERY_S, heartbeat_timeout_s / 10)
        self._timeout_s = heartbeat_timeout_s
        self._liveness = Liveness(heartbeat_timeout_s)
        # A worker heard only every few seconds is judged by several heartbeats.
        self._progress = TokenProgress(floor_s=max(FLOOR_S, 2 * heartbeat_s), pause_s=PAUSE_S * max(1.0, heartbeat_s))
        self._progressed: dict[str, float] = {}
        self._delays: dict[str, HeartbeatDelay] = {}
        self._beats: dict[str, tuple[HeartbeatReport, float]] = {}  # the last one, and when its engine made a token

    def heard(self, session: WorkerSession, now: float) -> None:
        """Note that a message came."""
        self._liveness.heard(session.session_id, now)

    def quiet_s(self, session: WorkerSession, now: float) -> float:
        """Seconds since the last message."""
        return self._liveness.since(session.session_id, now)

    def delay_s(self, session: WorkerSession, uptime_s: float, now: float) -> float | None:
        """By how much a heartbeat that was sent at `uptime_s` was taken in late; None: it does not tell."""
        if (delay := self._delays.get(session.session_id)) is None:
            delay = self._delays[session.session_id] = HeartbeatDelay()
        return delay.of(uptime_s, now)

    def gone(self, session: WorkerSession) -> None:
        """Forget a session that is over."""
        self._liveness.forget(session.session_id)
        self._progress.forget(session.session_id)
        self._progressed.pop(session.session_id, None)
        self._delays.pop(session.session_id, None)
        self._beats.pop(session.session_id, None)

    def judge(self, sessions: Iterable[WorkerSession], now: float, late_s: float = 0.0) -> list[SuspectWorker]:
        """The workers to give up. Call it every `judge_every_s`. `late_s`: by which the event loop was late lately."""
        watched = {session.session_id: session for session in sessions}
        for session in watched.values():
            if self._progressed.get(session.session_id) != session.progressed:
                self._progressed[session.session_id] = session.progressed
                self._progress.arrived(session.session_id, session.progressed)
        found = dict[str, SuspectWorker]()
        for session_id in self._liveness.silent(now, late_s):
            quiet_s = self._liveness.since(session_id, now)
            found[session_id] = SuspectWorker(session_id, f"no heartbeat for {quiet_s:.1f} s", quiet_s)
        for session_id in self._progress.stalled(
            [self._doing(session, now) for session in watched.values()], now, late_s
        ):
            quiet_s = self._progress.quiet_s(session_id, now)
            but = "it is held all that time" if watched[session_id].beat.held else "its heartbeats go on"
            reason = f"no token for {quiet_s:.1f} s, though it has work and {but}"
            found.setdefault(session_id, SuspectWorker(session_id, reason, quiet_s))
        for session_id, session in watched.items():
            if (kept_s := _kept_s(session, now)) > _OBEYS_S + late_s:
                reason = f"it has not handed back what it was asked for {kept_s:.0f} s ago"
                found.setdefault(session_id, SuspectWorker(session_id, reason, kept_s))
        return list(found.values())

    def _doing(self, session: WorkerSession, now: float) -> WorkerActivity:
        heard = now - self._liveness.since(session.session_id, now)
        return WorkerActivity(
            session=session.session_id,
            started=len(session.attempts) - len(session.pending),
            pending=len(session.pending),
            unread=_unread(session),
            heard=heard,
            made=self._made(session, heard),
            held=session.beat.held and not session.reclaimed,
            flush_s=session.flush_interval_s,
            excused=session.storing > 0,
            reclaimed=session.reclaimed,
        )

    def _made(self, session: WorkerSession, heard: float) -> float:
        """When the engine made its last token, by the last heartbeat; -inf for a worker without work."""
        beat, made = self._beats.get(session.session_id, (None, -inf))
        if beat is not session.beat:
            made = heard - session.beat.quiet_s if session.beat.quiet_s > 0 else -inf
            self._beats[session.session_id] = (session.beat, made)
        return made


def _unread(session: WorkerSession) -> int:
    """Tokens that the worker reads before it makes any; more for a borrowed one, which has only a share of the time."""
    tokens = sum(attempt.rollout.length for attempt in session.pending.values())
    said = session.beat.borrowed
    return int(tokens / max(_LEAST_SHARE, said.share)) if session.borrowed and said else tokens


def _kept_s(session: WorkerSession, now: float) -> float:
    """For how long the worker has kept what was asked back; 0.0 while it waits for the store to take its tokens."""
    if not session.freed or session.storing:
        return 0.0
    return now - min(freed.first for freed in session.freed.values())
