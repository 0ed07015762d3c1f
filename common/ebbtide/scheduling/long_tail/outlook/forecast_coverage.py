"""Counts how often forecast intervals cover the lengths that come, so that an operator sees whether they hold.

Each rollout counts by what was expected when it first got a worker. Four of five should lie within.

Invariant: `_asked` has the intervals of rollouts that were forecast and are not over. Lost with the process: these are
not counted.
"""

from typing import Final, NamedTuple

from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook

#: Intervals that are remembered.
_MEMORY: Final = 1 << 17


class CoverageCount(NamedTuple):
    covered: int  # responses within their interval
    ended: int  # responses that had one


class ForecastCoverage:
    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, float]] = {}
        self.count = self._taken = CoverageCount(0, 0)

    def foresaw(self, rollout_id: str, outlook: LengthOutlook) -> None:
        """Note what is expected of a response of which nothing is made. The first word counts."""
        if rollout_id not in self._asked and len(self._asked) < _MEMORY:
            self._asked[rollout_id] = outlook.tenth, outlook.ninth

    def ended(self, rollout_id: str, tokens: int) -> None:
        """Note a response that ended, by itself or at its cap."""
        interval = self._asked.pop(rollout_id, None)
        if interval is not None:
            # A response at its cap would have gone on: the interval's end at the cap stands for all beyond.
            covered = interval[0] <= tokens <= interval[1]
            self.count = CoverageCount(self.count.covered + covered, self.count.ended + 1)

    def take(self) -> CoverageCount:
        """What was counted since the last call."""
        before, self._taken = self._taken, self.count
        return CoverageCount(self.count.covered - before.covered, self.count.ended - before.ended)

    def forget(self, rollout_id: str) -> None:
        """Note that a rollout is over without a whole response."""
        self._asked.pop(rollout_id, None)
