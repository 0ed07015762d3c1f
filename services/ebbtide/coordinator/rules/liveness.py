"""Finds workers that have been silent for too long, even if the judge is late, or heartbeats of the whole fleet are.

Silence is to prove that one worker is gone. It proves less while this process is late itself, while others' heartbeats
come late too, and where many fall silent at once: then the machine, or the way to the fleet, is more likely the cause.
So patience grows by these, up to a bound: a worker that is gone is found all the same. Similar in spirit to accrual
failure detectors (Hayashibara et al., SRDS 2004), which learn how late heartbeats usually are.

Invariant: only time in which the judge was awake counts as silence. Lost with the process: a new coordinator hears
every worker attach.
"""

from collections import deque
from math import inf
from typing import Final

#: Two heartbeats of 1 s, and some delay. With a judgement every JUDGE_EVERY_S a silent worker is found within 3 s.
TIMEOUT_S: Final = 2.5
JUDGE_EVERY_S: Final = 0.25
#: By so much patience grows at most: whoever is gone is found within nine seconds.
_MOST_MORE_S: Final = 6.0
#: A gap between messages of one worker that is longer than this part of the timeout shows that heartbeats come late.
_LATE: Final = 0.7
#: Patience grows by so many times what a gap was longer, for so many seconds.
_TIMES: Final = 2.0
_REMEMBERED_S: Final = 10.0
#: So many workers, and so large a part of the fleet, do not fall silent by chance at once.
_FEW: Final = 8
_PART: Final = 0.1
#: After a takeover workers still come back while the last one that did is no longer ago than this; such waiting ends
#: that long after it.
_COMING_S: Final = 2.0
_ALL_BACK_S: Final = 30.0


class Liveness:
    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._heard: dict[str, float] = {}
        self._judged: float | None = None
        self._late: deque[tuple[float, float]] = deque()  # (when, gap): falling gaps, none older than remembered

    def heard(self, session: str, now: float) -> None:
        if self._judged is None:
            self._judged = now
        awake = (
            now if self._judged is None else min(now, self._judged + JUDGE_EVERY_S)
        )  # the judge may sleep since then
        gap = awake - self._heard.get(session, now)
        self._heard[session] = now
        if gap > _LATE * self._timeout_s:
            while self._late and self._late[-1][1] <= gap:
                self._late.pop()
            self._late.append((now, gap))

    def forget(self, session: str) -> None:
        self._heard.pop(session, None)

    def since(self, session: str, now: float) -> float:
        """Seconds since the session was heard."""
        return now - self._heard.get(session, now)

    def silent(self, now: float, late_s: float = 0.0) -> list[str]:
        """Sessions not heard for too long. Call often: a gap of half the timeout counts as the judge's sleep. `late_s`:
        by which this process was late lately.
        """
        if self._judged is not None and (asleep := now - self._judged) > self._timeout_s / 2:
            for session in self._heard:
                self._heard[session] = min(now, self._heard[session] + asleep)
        self._judged = now
        found = self._beyond(self._timeout_s + min(_MOST_MORE_S, late_s + self._tardy_s(now)), now)
        if len(found) > max(_FEW, _PART * len(self._heard)):
            return self._beyond(self._timeout_s + _MOST_MORE_S, now)
        return found

    def _beyond(self, patience_s: float, now: float) -> list[str]:
        return [session for session, heard in self._heard.items() if now - heard > patience_s]

    def _tardy_s(self, now: float) -> float:
        """What patience grows by since heartbeats came late."""
        while self._late and now - self._late[0][0] > _REMEMBERED_S:
            self._late.popleft()
        return _TIMES * (self._late[0][1] - _LATE * self._timeout_s) if self._late else 0.0


class Returning:
    """Whether workers still come back to a coordinator that took over. They come one after another: a large fleet, or a
    busy machine, takes longer than the grace of a few seconds, and what is given to others meanwhile is read again.
    """

    def __init__(self) -> None:
        self._began = self._last = -inf

    def begin(self, now: float) -> None:
        """Note that workers can attach from now on."""
        self._began = now

    def came(self, now: float) -> None:
        """Note that a worker attached with what it held."""
        self._last = now

    def more_s(self, now: float) -> float:
        """By how much longer a worker that did not come back is awaited; 0.0: no more come."""
        coming = now - self._last <= _COMING_S and now - self._began <= _ALL_BACK_S
        return _ALL_BACK_S if coming else 0.0
