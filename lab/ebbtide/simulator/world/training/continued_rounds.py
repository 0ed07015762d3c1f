"""Plays the live driver's rounds, whose groups go on behind their step, on simulated samples."""

from collections.abc import Sequence

from ebbtide.scheduling.long_tail.rounds.group_rounds import GroupRounds
from ebbtide.simulator.world.training.step_rounds import RoundChange, Rounds, Sample, StepRound


class ContinuedRounds(Rounds):
    """Invariant: `_missing` has the open groups of `decided`, with their samples that have not ended."""

    goes_on = True

    def __init__(self, decided: GroupRounds, group: int) -> None:
        """`group`: samples of a prompt."""
        self.decided, self._group = decided, group
        self._missing: dict[int, int] = {}

    def open(self, step: int) -> StepRound:
        begun = self.decided.open(step)
        self._missing.update(dict.fromkeys(begun, self._group))
        return _ContinuedRound(self, [Sample(prompt, one) for prompt in begun for one in range(self._group)])

    def ended(self, sample: Sample) -> RoundChange:
        """Note the end of a sample that any step began."""
        self._missing[sample.prompt] -= 1
        if self._missing[sample.prompt]:
            return RoundChange(trainable=(), complete=self.decided.complete)
        del self._missing[sample.prompt]
        self.decided.whole(sample.prompt)
        return self.taken()

    def taken(self) -> RoundChange:
        """The samples of the groups that the step takes now."""
        groups = self.decided.take()
        samples = tuple(Sample(group, one) for group in groups for one in range(self._group))
        return RoundChange(trainable=samples, complete=self.decided.complete)


class _ContinuedRound(StepRound):
    def __init__(self, rounds: ContinuedRounds, begin: Sequence[Sample]) -> None:
        self._rounds, self._begin = rounds, begin

    def begin(self) -> Sequence[Sample]:
        return self._begin

    def ended(self, sample: Sample) -> RoundChange:
        return self._rounds.ended(sample)

    def carried(self) -> RoundChange:
        return self._rounds.taken()
