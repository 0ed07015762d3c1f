"""Says which rollouts a training step begins with, and when it has enough.

Ebbtide's own rule is `WholeGroups`. Rivals have others.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ebbtide.driver.group_rounds import GroupRounds


class Sample(NamedTuple):
    """One response to one prompt. `prompt` counts over the whole run: a prompt that is asked again keeps its number."""

    prompt: int
    sample: int


class RoundChange(NamedTuple):
    """What follows from the end of a sample."""

    abandon: Sequence[Sample] = ()  # their rollouts are cancelled, and what they made is dropped
    complete: bool = False  # the step has all that it trains on
    trainable: Sequence[Sample] | None = None  # whose gradients may be computed now; None: the sample that ended


class StepRound(Protocol):
    """One step's round."""

    def begin(self) -> Sequence[Sample]:
        """The samples to submit at once, in the order of the queue."""
        ...

    def ended(self, sample: Sample) -> RoundChange:
        """Note that a sample's last turn has ended."""
        ...

    def carried(self) -> RoundChange:
        """What follows from samples that ended before the step opened."""
        return RoundChange(trainable=())


class Rounds(Protocol):
    """A run's rounds. Invariant: `open` is called once for each step, in order."""

    #: Whether samples go on behind their step. Then no step opens ahead of training, and the next step's round is told
    #: of samples that former ones began.
    goes_on: bool = False

    def open(self, step: int) -> StepRound: ...


class WholeGroups(Rounds):
    """Each step asks its own prompts, and trains on all of their responses. `together`: a sample's gradient needs its
    whole group, as its advantage does.
    """

    def __init__(self, prompts: int, group: int, *, together: bool = False) -> None:
        self._prompts, self._group, self._together = prompts, group, together

    def open(self, step: int) -> StepRound:
        first = step * self._prompts
        return _WholeRound(
            [Sample(first + prompt, sample) for prompt in range(self._prompts) for sample in range(self._group)],
            self._group if self._together else 0,
        )


class _WholeRound(StepRound):
    """`group`: samples that are trained on together; 0: each by itself."""

    def __init__(self, samples: Sequence[Sample], group: int) -> None:
        self._samples, self._open, self._group = samples, len(samples), group
        self._ended: dict[int, list[Sample]] = {}  # by prompt

    def begin(self) -> Sequence[Sample]:
        return self._samples

    def ended(self, sample: Sample) -> RoundChange:
        self._open -= 1
        if not self._group:
            return RoundChange(complete=not self._open)
        siblings = self._ended.setdefault(sample.prompt, [])
        siblings.append(sample)
        whole = siblings if len(siblings) == self._group else ()
        return RoundChange(complete=not self._open, trainable=whole)


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
