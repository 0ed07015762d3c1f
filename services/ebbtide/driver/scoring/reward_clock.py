"""Ends a scoring once it is out of time, by limits that know what right answers to its problem took."""

import asyncio
import time
from math import inf
from typing import Final, TypeVar

from ebbtide.driver.host_process import TookTooLong
from ebbtide.driver.scoring.cpu_waits import CpuWaits
from ebbtide.scheduling.long_tail.rewards.reward_limits import RewardLimits

T = TypeVar("T")

#: A scoring that waited for a CPU is asked again after its missing time, but not more often than this.
_LEAST_S: Final = 0.02


class OutOfTime(TookTooLong):
    """A scoring was cut by its own limit, not by its episode's."""

    def __init__(self, own_s: float) -> None:
        super().__init__(f"the reward took more than {own_s:.3g} s")


class RewardClock:
    """Watches one scoring."""

    def __init__(self, limits: RewardLimits, problem: str, *, pid: int) -> None:
        """`pid`: of the process that scores, whose waits for a CPU do not count."""
        self._limits, self._problem = limits, problem
        self._waits, self._began = CpuWaits(pid), time.monotonic()
        self.explored = False

    @property
    def own_s(self) -> float:
        """Seconds since the beginning, without those that the process waited for a CPU."""
        wall_s = time.monotonic() - self._began
        return max(0.0, wall_s - self._waits.since_s())

    async def watch(self, call: "asyncio.Future[T]") -> T:
        """Returns what the call does. Raises `OutOfTime` once it is to be cut, and leaves it running."""
        limit_s, own_s = self._limits.limit_s(self._problem), 0.0
        while True:
            wait_s = max(_LEAST_S, limit_s - own_s)
            await asyncio.wait({call}, timeout=wait_s if wait_s < inf else None)
            if call.done():
                return call.result()
            own_s = self.own_s
            if own_s < limit_s:
                continue
            if self.explored or not self._limits.explores(self._problem):
                raise OutOfTime(own_s)
            self.explored, limit_s = True, self._limits.ceiling_s
