"""Ends a scoring once it is out of time. What its process waited for a CPU is not its time."""

import asyncio
import time
from math import inf
from typing import Final, TypeVar

from ebbtide.driver.host_process import TookTooLong
from ebbtide.driver.scoring.cpu_waits import CpuWaits

T = TypeVar("T")

#: A scoring that waited for a CPU is asked again after its missing time, but not more often than this.
_LEAST_S: Final = 0.02


class OutOfTime(TookTooLong):
    """A scoring was cut by its own limit, not by its episode's."""

    def __init__(self, own_s: float) -> None:
        super().__init__(f"the reward took more than {own_s:.3g} s")


class RewardClock:
    """Watches one scoring."""

    def __init__(self, limit_s: float, *, pid: int) -> None:
        """`limit_s`: seconds of its own; inf: it has none. `pid`: of the process that scores."""
        self._limit_s = limit_s
        self._waits, self._began = CpuWaits(pid), time.monotonic()

    @property
    def own_s(self) -> float:
        """Seconds since the beginning, without those that the process waited for a CPU."""
        wall_s = time.monotonic() - self._began
        return max(0.0, wall_s - self._waits.since_s())

    async def watch(self, call: "asyncio.Future[T]") -> T:
        """Returns what the call does. Raises `OutOfTime` once it is to be cut, and leaves it running."""
        own_s = 0.0
        while own_s < self._limit_s:
            wait_s = max(_LEAST_S, self._limit_s - own_s)
            await asyncio.wait({call}, timeout=wait_s if wait_s < inf else None)
            if call.done():
                return call.result()
            own_s = self.own_s
        raise OutOfTime(own_s)
