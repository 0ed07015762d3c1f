"""Says whether the mirror of a run may be used: what the store had when it was read last may have changed since.

Invariant: whoever asks the store to change the run holds `lock`. A call with an unknown outcome makes the mirror
`stale`; it is read again before it is used to place. After the store came back the run is not `reconciled` until that
store was told of the live attempts. Lost with the process: each run is read, and reconciled, at take-over.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.notifier import DispatchWakeups

log = telemetry.get_logger(__name__)
#: Its decisions rest for so long once the store refused its writes: the first time, and at most.
_REFUSED_S, _LONGEST_REFUSED_S = 0.2, 5.0


#: A pause takes so long: the first time, and at most. A new fault within `_SOON_S` of the last pause doubles it.
_PAUSE_S, _LONGEST_PAUSE_S, _SOON_S = 1.0, 60.0, 10.0


class FaultPause:
    """Leaves one run alone for a while when the store gives an unexpected reply for it, and logs each such pause."""

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


class RunMirror:
    def __init__(self, run_id: str, wakeups: DispatchWakeups, clock: Callable[[], float]) -> None:
        self.run_id, self._wakeups, self._clock = run_id, wakeups, clock
        self.lock: Final = asyncio.Lock()
        self.stale = True  # until it is read
        self._doubts = 0  # how often it became stale
        #: The store's present incarnation knows all live attempts except the unconfirmed ones. Until then appends
        #: wait, so that no worker is told SUPERSEDED because the store forgot.
        self.reconciled: Final = asyncio.Event()
        #: Appends need not wait: the run is reconciled, or its data is broken and its attempts are over.
        self.answerable: Final = asyncio.Event()
        self._ended_lately: set[str] | None = None  # rollouts that end while the mirror is being read again
        self._pause = FaultPause(run_id)
        self.refusals: Final = FaultPause(run_id, _REFUSED_S, _LONGEST_REFUSED_S)

    def set_stale(self, stale: bool) -> None:
        """Note whether the mirror may have missed something; nothing is placed by such a one."""
        self.stale = stale
        self._doubts += stale

    def mark_stale(self) -> None:
        """Have the mirror read again: the store said what it does not."""
        self.set_stale(True)
        self._wakeups.decide()

    def paused(self, now: float) -> bool:
        """Whether the dispatcher leaves the run alone for now."""
        return self._pause.lasts(now)

    def pause(self, error: Exception, now: float | None = None) -> float:
        """Leave the run alone for a while, then read it again: the store gave an unexpected reply. Returns seconds."""
        self.set_stale(True)
        self.answerable.set()
        return self._pause.begin(error, self._clock() if now is None else now)

    @contextmanager
    def rereading(self) -> Iterator[AbstractSet[str]]:
        """Entered while the mirror is read again. Yields the rollouts that end meanwhile. It stays stale if the reading
        fails, or if it missed something that happened meanwhile.
        """
        ended: set[str] = set()
        doubts, self._ended_lately = self._doubts, ended
        if not self.reconciled.is_set():
            self.answerable.clear()
        try:
            yield ended
            if self._doubts == doubts:
                self.set_stale(False)
        except BaseException:
            if self.paused(self._clock()):
                self.answerable.set()
            raise
        finally:
            self._ended_lately = None

    def doubt(self) -> None:
        """Note that the store may know less than the mirror: appends wait until the run is reconciled."""
        self.reconciled.clear()
        if not self.paused(self._clock()):
            self.answerable.clear()

    def note_reconciled(self) -> None:
        self.reconciled.set()
        self.answerable.set()

    def note_ended(self, rollout_id: str) -> None:
        """Note that a rollout ended: what is being read of the store may still have it."""
        if self._ended_lately is not None:
            self._ended_lately.add(rollout_id)
