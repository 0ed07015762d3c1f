"""Leaves one run alone for a while when the store gives an unexpected reply for it, and logs each such pause."""

import math

from ebbtide import telemetry

log = telemetry.get_logger(__name__)
#: A pause takes so long: the first time, and at most. A new fault within `_SOON_S` of the last pause doubles it.
_PAUSE_S, _LONGEST_PAUSE_S, _SOON_S = 1.0, 60.0, 10.0


class FaultPause:
    def __init__(self, run_id: str, first_s: float = _PAUSE_S, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._run_id, self._first_s, self._longest_s = run_id, first_s, longest_s
        self._pause_s, self._until = 0.0, -math.inf

    def lasts(self, now: float) -> bool:
        return now < self._until

    def begin(self, error: Exception, now: float) -> float:
        """Pause, unless a pause lasts already. Returns for how many seconds from now."""
        if not self.lasts(now):
            again = now < self._until + _SOON_S
            self._pause_s = min(self._longest_s, 2 * self._pause_s) if again else self._first_s
            self._until = now + self._pause_s
            log.error("run paused", run_id=self._run_id, seconds=self._pause_s, reason=str(error))
        return self._until - now
