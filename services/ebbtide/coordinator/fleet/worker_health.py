"""Judges workers: which of them are silent or stalled, were lost too often, and may get work."""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.coordinator.rules.liveness import JUDGE_EVERY_S, Liveness
from ebbtide.coordinator.rules.overload import HeartbeatDelay
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession

#: Least wait for a token; with four judgements a second a stalled worker is found within 3 s.
FLOOR_S: Final = 2.0
#: Longest wait: a first token may have to wait for a compilation.
CEILING_S: Final = 60.0
#: Longest delay between a token that the worker reports as made and its arrival.
LATE_S: Final = 15.0
#: A worker counts as heard for so long after each message: a heartbeat, and some delay.
PAUSE_S: Final = 1.25
#: A gap of so many times the longest lately is a stall.
_FACTOR: Final = 2.0
#: Half-life of a gap once seen; a wait for a first token is halved by each further one.
_HALF_LIFE_S: Final = 60.0
#: Tokens/s that a slow machine prefills, without making any meanwhile.
_READ_TOKENS_PER_S: Final = 1_000.0


class WorkerActivity(Struct, frozen=True, kw_only=True, gc=False):
    session: str
    started: int  # attempts that have made a token
    pending: int  # attempts that have not
    heard: float  # when its last message came
    unread: int = 0  # tokens of the pending attempts, which it prefills first
    made: float = -inf  # when its engine made a token last, as it reports; -inf: not reported
    held: bool = False  # makes no tokens now, on purpose and for a limited time
    excused: bool = False  # its tokens may be delayed by the store
    flush_s: float = 0.0  # the least time between two of its flushes, as it was told
    reclaimed: bool = False  # the host of a borrowed worker serves users now


class _Watched(Struct):
    """A worker as judged last. `generating`, `paused`: its `WorkerActivity.started` and `held`."""

    waits_since: float  # begin of the wait for a token, or a hold's end
    learnt: float  # when `gap_s` was updated
    heard: float
    made: float = -inf
    generating: int = 0
    read_s: float = 0.0  # how long the prefill may take
    flush_s: float = 0.0
    paused: bool = False
    busy: bool = False
    gap_s: float = 0.0  # longest lately
    first_s: float = 0.0  # as `gap_s`, for first tokens


class TokenProgress:
    """Finds workers that have stopped making tokens, though they have work and send heartbeats.

    The allowed gap is learnt for each worker: a loaded one has longer gaps. A worker that reports that its engine makes
    tokens gets more time to deliver them. Invariant: only time counts in which the worker had work, could do it and was
    heard, and the judge was awake; silence is judged by `liveness`. While a borrowed worker's host is reclaimed, the
    wait pauses. Lost with the process: gaps are learnt again.

    `floor_s` must be longer than `pause_s`: a worker that falls silent between two tokens is `liveness`'s case.
    """

    def __init__(self, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S, pause_s: float = PAUSE_S) -> None:
        self._floor_s, self._ceiling_s, self._pause_s = floor_s, ceiling_s, pause_s
        self._watched: dict[str, _Watched] = {}
        self._judged: float | None = None

    def arrived(self, session: str, now: float) -> None:
        """Note that tokens of the worker arrived, stored or not."""
        one = self._watched.get(session)
        if one is None:
            return
        if one.busy and not one.paused:
            one.gap_s, one.learnt = one.gap_s * 0.5 ** ((now - one.learnt) / _HALF_LIFE_S), now
            gap_s = now - max(one.waits_since, one.made)  # tokens made in between were only late
            if one.generating:
                one.gap_s = max(one.gap_s, gap_s)
            else:
                one.first_s = max(one.first_s / 2, gap_s, self._floor_s / _FACTOR)
                one.generating = 1  # tokens before the next judgement are not first ones
        one.waits_since = now

    def forget(self, session: str) -> None:
        self._watched.pop(session, None)

    def quiet_s(self, session: str, now: float) -> float:
        """How long tokens of the worker have been waited for, while it was heard; 0.0 if none are expected."""
        one = self._watched.get(session)
        return max(0.0, min(now, one.heard + self._pause_s) - one.waits_since) if one is not None and one.busy else 0.0

    def allowed_s(self, session: str) -> float:
        """How long the wait for the worker may be now."""
        one = self._watched.get(session)
        if one is None or one.paused:
            return self._ceiling_s
        usual = one.gap_s if one.generating else max(one.gap_s, one.first_s)
        if not one.generating and not one.first_s:
            return self._ceiling_s  # no first token was seen yet
        return min(self._ceiling_s, max(self._floor_s, _FACTOR * usual) + one.read_s + one.flush_s)

    def stalled(self, doings: Iterable[WorkerActivity], now: float, late_s: float = 0.0) -> list[str]:
        """The sessions without a token for too long. Call at least four times a second, with all sessions: a gap of
        half the floor counts as the judge's sleep. `late_s`: by which this process was late lately; each may take so
        much longer.
        """
        asleep = 0.0 if self._judged is None else now - self._judged
        self._judged = now
        found = []
        for doing in doings:
            one = self._watched.get(doing.session)
            if one is None:
                one = self._watched[doing.session] = _Watched(waits_since=now, learnt=now, heard=doing.heard)
            silent = max(0.0, doing.heard - one.heard - self._pause_s)
            paused = asleep if doing.reclaimed or asleep > self._floor_s / 2 else 0.0
            one.waits_since = min(now, one.waits_since + max(silent, paused))
            one.heard, one.made = doing.heard, doing.made
            busy = not doing.excused and doing.started + doing.pending > 0
            if not busy or not one.busy or one.paused != doing.held:
                one.waits_since = now
            elif one.generating and not doing.started:
                one.waits_since = now  # the started ones have ended; the wait for the next first token begins
            one.busy, one.generating, one.paused = busy, doing.started, doing.held
            one.read_s, one.flush_s = doing.unread / _READ_TOKENS_PER_S, doing.flush_s
            if busy and self._too_long(doing.session, one, now, late_s):
                found.append(doing.session)
        return found

    def _too_long(self, session: str, one: _Watched, now: float, late_s: float) -> bool:
        waited, allowed = self.quiet_s(session, now), self.allowed_s(session) + late_s
        if waited <= allowed:
            return False
        unmade = min(now, one.heard + self._pause_s) - one.made
        return unmade > allowed or waited > max(LATE_S, allowed)


#: A worker that hands back nothing for so long, though asked several times, is stuck.
_OBEYS_S: Final = 45.0
#: Least share of its time that a borrowed worker is assumed to have.
_LEAST_SHARE: Final = 0.05


class SuspectWorker(NamedTuple):
    session_id: str
    reason: str
    quiet_s: float  # since its last sign of life, or of work


class WorkerHealth:
    """Finds workers to give up: silent ones, those that stopped generating, and those that keep what was asked back.

    Invariant: exactly the attached sessions are watched. Lost with the process: workers attach again, and all are
    trusted.
    """

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
            if self._progressed.get(session.session_id) != session.append_stream.progressed:
                self._progressed[session.session_id] = session.append_stream.progressed
                self._progress.arrived(session.session_id, session.append_stream.progressed)
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
            excused=session.append_stream.storing > 0,
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
    if not session.freed or session.append_stream.storing:
        return 0.0
    return now - min(freed.first for freed in session.freed.values())


#: One loss may be the network's; from the second on the quarantine doubles.
_FREE: Final = 1
_SHORTEST_S: Final = 5.0
_LONGEST_S: Final = 300.0
_FORGIVEN_S: Final = 600.0
#: A longer attachment earns no strike: connections end now and then.
_LASTED_S: Final = 60.0
#: Losses within so long, of so many workers and so large a part of the fleet, have one common cause. They are detected
#: up to a heartbeat and a judgement apart.
_TOGETHER_S: Final = 2.0
_MANY: Final = 3
_LARGE_PART: Final = 0.5


class _Record(NamedTuple):
    strikes: int
    lost: float


class _Loss(NamedTuple):
    worker_id: str
    when: float
    before: _Record | None  # the worker's record before the loss


class WorkerTrust:
    """Says which workers may get work, and why none may. Those that are lost too often are quarantined.

    Invariant: a worker has one strike for each short attachment that it lost without notice, unless a large part of the
    fleet was lost with it: then the network or the coordinator failed. All strikes are forgiven `_FORGIVEN_S` after the
    last. Lost with the process: all are trusted.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._records: dict[str, _Record] = {}
        self._attached: dict[str, float] = {}  # since when
        self._lately: deque[_Loss] = deque()

    def attached(self, worker_id: str, now: float) -> None:
        """Note that the worker attached; it may have been attached already."""
        self._attached.setdefault(worker_id, now)

    def left(self, worker_id: str) -> None:
        """Note that the worker left as announced."""
        self._attached.pop(worker_id, None)

    def lost(self, worker_id: str, now: float) -> None:
        """Note that the worker was lost without notice."""
        before = self._record(worker_id, now)
        if now - self._attached.pop(worker_id, now) < _LASTED_S:
            self._records = {name: one for name, one in self._records.items() if now - one.lost < _FORGIVEN_S}
            self._records[worker_id] = _Record(before.strikes + 1 if before else 1, now)
        self._lately.append(_Loss(worker_id, now, before))
        while now - self._lately[0].when > _TOGETHER_S:
            self._lately.popleft()
        gone = {loss.worker_id for loss in self._lately}
        if len(gone) >= max(_MANY, _LARGE_PART * len(gone | self._attached.keys())):
            self._take_back()

    def _take_back(self) -> None:
        for loss in reversed(self._lately):
            if loss.before is None:
                self._records.pop(loss.worker_id, None)
            else:
                self._records[loss.worker_id] = loss.before

    def quarantined_s(self, worker_id: str, now: float) -> float:
        """For how much longer the worker gets no work; 0.0 if it is trusted."""
        record = self._record(worker_id, now)
        if record is None or record.strikes <= _FREE:
            return 0.0
        pause = min(_LONGEST_S, _SHORTEST_S * 2.0 ** min(record.strikes - _FREE - 1, 16))
        return max(0.0, record.lost + pause - now)

    def quarantined(self, now: float) -> set[str]:
        """The workers that get no work now."""
        return {worker_id for worker_id in self._records if self.quarantined_s(worker_id, now)}

    def trusts(self, session: WorkerSession, now: float) -> bool:
        """Whether the worker may get rollouts at all."""
        return not session.draining and not session.given_up and not self.quarantined_s(session.worker_id, now)

    def lacking(self, now: float) -> str:
        """Why no attached worker may get work; "" if one may."""
        sessions = self._state.sessions.values()
        if any(self.trusts(session, now) for session in sessions):
            return ""
        if not sessions:
            return "waits for workers: none is attached"
        given_up = sum(bool(session.given_up) for session in sessions)
        but = f" or are given up ({given_up}): their hosts cost more than they bring" if given_up else ""
        return f"waits for workers: of {len(sessions)} attached, all drain or were lost too often{but}"

    def _record(self, worker_id: str, now: float) -> _Record | None:
        record = self._records.get(worker_id)
        return record if record is not None and now - record.lost < _FORGIVEN_S else None
