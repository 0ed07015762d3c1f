"""Finds workers that have been silent for too long, even if the judge itself was asleep.

Invariant: only time in which the judge was awake counts as silence. Lost with the process: a new coordinator hears
every worker attach.
"""

from typing import Final

#: Two heartbeats of 1 s, and some delay. With a judgement every JUDGE_EVERY_S a silent worker is found within 3 s.
TIMEOUT_S: Final = 2.5
JUDGE_EVERY_S: Final = 0.25


class Liveness:
    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._heard: dict[str, float] = {}
        self._judged: float | None = None

    def heard(self, session: str, now: float) -> None:
        self._heard[session] = now

    def forget(self, session: str) -> None:
        self._heard.pop(session, None)

    def since(self, session: str, now: float) -> float:
        """Seconds since the session was heard."""
        return now - self._heard.get(session, now)

    def silent(self, now: float) -> list[str]:
        """Sessions not heard for the timeout. Call often: a gap of half the timeout counts as the judge's sleep."""
        if self._judged is not None and (asleep := now - self._judged) > self._timeout_s / 2:
            for session in self._heard:
                self._heard[session] = min(now, self._heard[session] + asleep)
        self._judged = now
        return [session for session, heard in self._heard.items() if now - heard > self._timeout_s]
