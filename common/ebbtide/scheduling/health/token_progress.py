"""Which workers have stopped making tokens though they have work and their heartbeats go on.

How long is too long is learnt of each worker: a loaded one has longer gaps. A worker that says itself that its engine
makes tokens is given more time to bring them here. Invariant: a worker is waited for only in time that it had work,
could do it, was heard in, and the judge was awake in: who is silent is another's case (`liveness`). A borrowed one is
not waited for while its host has itself back, however long that is; but what it was waited for before still counts.
Lost with the process: gaps are learnt anew.
"""

from collections.abc import Iterable
from math import inf
from typing import Final

from msgspec import Struct

#: The least that a worker is waited for; with a judge four times a second it is found within 3 s.
FLOOR_S: Final = 2.0
#: And the most, whatever it has shown: a first token may wait behind a compilation.
CEILING_S: Final = 60.0
#: So long, and no longer, tokens may be on their way of which the worker says that they were made.
LATE_S: Final = 15.0
#: A worker counts as heard in for so long after each message: a heartbeat, and what it may be late by.
PAUSE_S: Final = 1.25
#: Longest gap seen lately, times this, is out of the ordinary.
_FACTOR: Final = 2.0
#: In so long a gap once seen counts for half; a wait for a first token does so with the next one that is seen.
_HALF_LIFE_S: Final = 60.0
#: A slow machine reads so many tokens a second, and may make none meanwhile.
_READ_TOKENS_PER_S: Final = 1_000.0


class WorkerActivity(Struct, frozen=True, kw_only=True):
    """What a worker is about: attempts that have made a token, and attempts that have not. `unread`: tokens of prompt
    and partial of the latter, which are read before they make one. `heard`: when any message of it came last; `made`:
    when its engine made a token last, as it says itself (-inf: it does not say). `held`: it makes no tokens now, on
    purpose, which ends. `excused`: they may not come through, through no fault of its own: its store is away.
    `standing`: the host of a borrowed worker has itself back.
    """

    session: str
    started: int
    pending: int
    heard: float
    unread: int = 0
    made: float = -inf
    held: bool = False
    excused: bool = False
    standing: bool = False


class _Watched(Struct):
    """`since`: from when on tokens, or a hold's end, are waited for; `read_s`: what reading may take; the others: as in
    `WorkerActivity`, as judged last.
    """

    since: float
    learnt: float
    heard: float
    made: float = -inf
    started: int = 0
    read_s: float = 0.0
    held: bool = False
    busy: bool = False
    gap_s: float = 0.0
    first_s: float = 0.0


class TokenProgress:
    """`floor_s` is to be longer than `pause_s`, so that who falls silent between two tokens is not found here."""

    def __init__(self, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S, pause_s: float = PAUSE_S) -> None:
        self._floor_s, self._ceiling_s, self._pause_s = floor_s, ceiling_s, pause_s
        self._watched: dict[str, _Watched] = {}
        self._judged: float | None = None

    def arrived(self, session: str, now: float) -> None:
        """Tokens of the worker arrived, stored or not."""
        one = self._watched.get(session)
        if one is None:
            return
        if one.busy and not one.held:
            one.gap_s, one.learnt = one.gap_s * 0.5 ** ((now - one.learnt) / _HALF_LIFE_S), now
            gap_s = now - max(one.since, one.made)  # what it made in between was late, not it
            if one.started:
                one.gap_s = max(one.gap_s, gap_s)
            else:
                one.first_s = max(one.first_s / 2, gap_s, self._floor_s / _FACTOR)
                one.started = 1  # what comes before the next judgement is no first token
        one.since = now

    def forget(self, session: str) -> None:
        self._watched.pop(session, None)

    def quiet_s(self, session: str, now: float) -> float:
        """For how long tokens of the worker have been waited for, in time that it was heard in; 0.0 while none are."""
        one = self._watched.get(session)
        return max(0.0, min(now, one.heard + self._pause_s) - one.since) if one is not None and one.busy else 0.0

    def allowed_s(self, session: str) -> float:
        """For how long the worker is waited for now."""
        one = self._watched.get(session)
        if one is None or one.held:
            return self._ceiling_s
        usual = one.gap_s if one.started else max(one.gap_s, one.first_s)
        if not one.started and not one.first_s:
            return self._ceiling_s  # never saw it start one
        return min(self._ceiling_s, max(self._floor_s, _FACTOR * usual) + one.read_s)

    def stalled(self, doings: Iterable[WorkerActivity], now: float) -> list[str]:
        """The sessions that have made no token for too long. Call it at least four times a second, with all of them: a
        gap of half the floor is taken for our own sleep.
        """
        asleep = 0.0 if self._judged is None else now - self._judged
        self._judged = now
        found = []
        for doing in doings:
            one = self._watched.get(doing.session)
            if one is None:
                one = self._watched[doing.session] = _Watched(since=now, learnt=now, heard=doing.heard)
            silent = max(0.0, doing.heard - one.heard - self._pause_s)
            paused = asleep if doing.standing or asleep > self._floor_s / 2 else 0.0
            one.since = min(now, one.since + max(silent, paused))
            one.heard, one.made = doing.heard, doing.made
            busy = not doing.excused and doing.started + doing.pending > 0
            if not busy or not one.busy or one.held != doing.held:
                one.since = now
            elif one.started and not doing.started:
                one.since = now  # those that ran have ended; the next one's first token is another wait
            one.busy, one.started, one.held = busy, doing.started, doing.held
            one.read_s = doing.unread / _READ_TOKENS_PER_S
            if busy and self._too_long(doing.session, one, now):
                found.append(doing.session)
        return found

    def _too_long(self, session: str, one: _Watched, now: float) -> bool:
        waited, allowed = self.quiet_s(session, now), self.allowed_s(session)
        if waited <= allowed:
            return False
        unmade = min(now, one.heard + self._pause_s) - one.made
        return unmade > allowed or waited > max(LATE_S, allowed)
