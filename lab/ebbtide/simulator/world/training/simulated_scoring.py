"""Models the processes that score a run's responses: how many there are, when they begin, and what ends a scoring.

Invariant: at most `scorers` scorings run. Those that wait are in the order of arrival.
"""

from collections import deque
from collections.abc import Callable
from math import inf

from msgspec import Struct

from ebbtide.simulator.scenario.training_run import SimulatedRewards
from ebbtide.simulator.world.virtual_time import VirtualTime


class WaitingScoring(Struct, eq=False):
    """A response that has ended."""

    step: int
    takes_s: float
    scored: Callable[[], None]


class SimulatedScoring:
    def __init__(self, rewards: SimulatedRewards, time: VirtualTime) -> None:
        self._time, self._after = time, rewards.when == "after"
        self._free = rewards.scorers or inf
        self._limit_s = rewards.timeout_s or inf
        self._held: dict[int, list[WaitingScoring]] = {}  # by step, where all its responses are scored together
        self._queue: deque[WaitingScoring] = deque()

    def score(self, scoring: WaitingScoring, *, generating: Callable[[], bool]) -> None:
        """Scores a response once there is room; where the run scores behind its rollout, once none of its step is
        `generating`."""
        if self._after:
            self._held.setdefault(scoring.step, []).append(scoring)
            if not generating():
                self._all_ended(scoring.step)
            return
        self._queue.append(scoring)
        self._begin()

    def _all_ended(self, step: int) -> None:
        self._queue += self._held.pop(step, ())
        self._begin()

    def _begin(self) -> None:
        while self._queue and self._free > 0:
            self._free -= 1
            self._run(self._queue.popleft())

    def _run(self, scoring: WaitingScoring) -> None:
        took_s = min(scoring.takes_s, self._limit_s)

        def ended() -> None:
            self._free += 1
            scoring.scored()
            self._begin()

        if took_s > 0.0:
            self._time.after(took_s, ended)
        else:
            ended()
