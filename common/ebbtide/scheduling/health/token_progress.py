"""Finds workers that have stopped making tokens, though they have work and send heartbeats.

The allowed gap is learnt for each worker: a loaded one has longer gaps. A worker that reports that its engine makes
tokens gets more time to deliver them. Invariant: only time counts in which the worker had work, could do it and was
heard, and the judge was awake; silence is judged by `liveness`. While a borrowed worker's host is reclaimed, the wait
pauses. Lost with the process: gaps are learnt again.
"""

from collections.abc import Iterable
from math import inf
from typing import Final

from msgspec import Struct

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
    """A worker as judged last; unnoted fields as in `WorkerActivity`."""

    since: float  # begin of the wait for a token, or a hold's end
    learnt: float  # when `gap_s` was updated
    heard: float
    made: float = -inf
    started: int = 0
    read_s: float = 0.0  # how long the prefill may take
    flush_s: float = 0.0
    held: bool = False
    busy: bool = False
    gap_s: float = 0.0  # longest lately
    first_s: float = 0.0  # as `gap_s`, for first tokens


class TokenProgress:
    """`floor_s` must be longer than `pause_s`: a worker that falls silent between two tokens is `liveness`'s case."""

    def __init__(self, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S, pause_s: float = PAUSE_S) -> None:
        self._floor_s, self._ceiling_s, self._pause_s = floor_s, ceiling_s, pause_s
        self._watched: dict[str, _Watched] = {}
        self._judged: float | None = None

    def arrived(self, session: str, now: float) -> None:
        """Note that tokens of the worker arrived, stored or not."""
        one = self._watched.get(session)
        if one is None:
            return
        if one.busy and not one.held:
            one.gap_s, one.learnt = one.gap_s * 0.5 ** ((now - one.learnt) / _HALF_LIFE_S), now
            gap_s = now - max(one.since, one.made)  # tokens made in between were only late
            if one.started:
                one.gap_s = max(one.gap_s, gap_s)
            else:
                one.first_s = max(one.first_s / 2, gap_s, self._floor_s / _FACTOR)
                one.started = 1  # tokens before the next judgement are not first ones
        one.since = now

    def forget(self, session: str) -> None:
        self._watched.pop(session, None)

    def quiet_s(self, session: str, now: float) -> float:
        """How long tokens of the worker have been waited for, while it was heard; 0.0 if none are expected."""
        one = self._watched.get(session)
        return max(0.0, min(now, one.heard + self._pause_s) - one.since) if one is not None and one.busy else 0.0

    def allowed_s(self, session: str) -> float:
        """How long the wait for the worker may be now."""
        one = self._watched.get(session)
        if one is None or one.held:
            return self._ceiling_s
        usual = one.gap_s if one.started else max(one.gap_s, one.first_s)
        if not one.started and not one.first_s:
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
                one = self._watched[doing.session] = _Watched(since=now, learnt=now, heard=doing.heard)
            silent = max(0.0, doing.heard - one.heard - self._pause_s)
            paused = asleep if doing.reclaimed or asleep > self._floor_s / 2 else 0.0
            one.since = min(now, one.since + max(silent, paused))
            one.heard, one.made = doing.heard, doing.made
            busy = not doing.excused and doing.started + doing.pending > 0
            if not busy or not one.busy or one.held != doing.held:
                one.since = now
            elif one.started and not doing.started:
                one.since = now  # the started ones have ended; the wait for the next first token begins
            one.busy, one.started, one.held = busy, doing.started, doing.held
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
