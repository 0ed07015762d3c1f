"""Ranks a run's queued rollouts, so that no long one starts late: one sample of each group first, then the longest.

Starting means to run until the end. Steps go one after another, since a trainer waits for the earliest. Within a step
those that have begun go on first. Then each group has a probe started, and then the samples go first that may become
longest: by the high quantile of what they have still to come, not by the mean. A group whose probe still runs may be
very long, and a long sample that starts late costs more than a short one that starts early. Seer (arXiv 2511.14617,
section 2.2 of its scheduling) is bold in the same way: it takes the cap as the length of such a group.

Lengths within a ninth of each other have one rank, and are taken as submitted. Where the samples of a group have little
in common, all are: the order of forecasts that tell nothing only delays samples whose siblings have begun.
"""

from heapq import heapify, heappop, heappush
from math import inf, log
from typing import Final, TypeAlias

from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts

#: A rollout waits at most so long while others of its step start before it: about as long as the longest responses
#: take at 40 tokens a second.
OLDEST_S: Final = 2_400.0
#: Step, tier, and minus the class of lengths; the lowest is next. Rollouts of equal rank go as they were submitted.
StartRank: TypeAlias = tuple[int, int, int]
#: What begun ones, probes and the others are ranked by within a step.
_BEGUN, _PROBE, _SIBLING = 0, 1, 2
#: Lengths that differ by less than this factor have one class.
_CLASS: Final = log(1.12)
#: Below this intraclass correlation, a group's samples tell little of each other.
LEAST_CORRELATION: Final = 0.3
#: Overdue rollouts of one call: all that were submitted together become so together.
_AT_ONCE: Final = 512
#: Entries of rollouts that left, before they are dropped, beyond one for each that waits.
_SPARE: Final = 1_024


class StartRanks:
    """`oldest_s`: what waited longer goes first within its step.

    Invariant: `_waits` has the rollouts that wait and are not overdue, and `_oldest` an entry for each, besides at most
    as many for others. Lost with the process: ages begin anew.
    """

    def __init__(self, forecasts: RunForecasts, *, oldest_s: float = OLDEST_S) -> None:
        self._forecasts, self._oldest_s = forecasts, oldest_s
        self._waits: dict[str, tuple[float, int]] = {}  # since when, and its step
        self._oldest: list[tuple[float, str]] = []  # a heap
        self._overdue = -inf  # what waits since then, or longer, has waited too long

    @property
    def tells(self) -> bool:
        """Whether forecasts tell enough of lengths to order by them."""
        learner = self._forecasts.learner
        return not learner.known or learner.intraclass_correlation >= LEAST_CORRELATION

    def waits(self, rollout_id: str, step: int, since: float) -> None:
        """Note that a rollout began to wait."""
        self._waits[rollout_id] = since, step
        heappush(self._oldest, (since, rollout_id))
        if len(self._oldest) > 2 * len(self._waits) + _SPARE:
            self._oldest = [(since, name) for name, (since, _) in self._waits.items()]
            heapify(self._oldest)

    def left(self, rollout_id: str) -> None:
        """Note that a rollout waits no more."""
        self._waits.pop(rollout_id, None)

    def forget_waits(self) -> None:
        """Forget what waits: the caller names it anew."""
        self._waits.clear()
        self._oldest.clear()

    def overdue(self, now: float) -> dict[str, StartRank]:
        """Rollouts that have waited too long by now, with their rank: some in each call."""
        found, self._overdue = dict[str, StartRank](), now - self._oldest_s
        while self._oldest and self._oldest[0][0] < self._overdue and len(found) < _AT_ONCE:
            since, rollout_id = heappop(self._oldest)
            began, step = self._waits.get(rollout_id, (inf, 0))
            if began == since:
                del self._waits[rollout_id]
                found[rollout_id] = step, _BEGUN, 0
        return found

    def rank(self, rollout_id: str, group: KnownGroup, *, step: int, begun: bool, since: float) -> StartRank:
        """The rank of a rollout that waits. `begun`: it has tokens, or its episode has had a turn; `since`: when it
        began to wait.
        """
        if begun or since < self._overdue or not self.tells:
            return step, _BEGUN, 0
        if not group.begun:
            if group.probe not in group.waiting:
                group.probe = rollout_id
            if group.probe == rollout_id:
                return step, _PROBE, self._class(group)
        return step, _SIBLING, self._class(group)

    def _class(self, group: KnownGroup) -> int:
        return -int(log(max(1.0, self._forecasts.unstarted(group).longest)) / _CLASS)
