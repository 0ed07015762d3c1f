"""Says which rollouts a training step begins with, and when it has enough.

Ebbtide's own rule is `WholeGroups`. Rivals' rounds stand in `simulator/rivals`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Sample(NamedTuple):
    """One response to one prompt. `prompt` counts over the whole run: a prompt that is asked again keeps its number."""

    prompt: int
    sample: int


class RoundChange(NamedTuple):
    """What follows from the end of a sample."""

    abandon: Sequence[Sample] = ()  # their rollouts are cancelled, and what they made is dropped
    complete: bool = False  # the step has all that it trains on


class StepRound(Protocol):
    """One step's round."""

    def begin(self) -> Sequence[Sample]:
        """The samples to submit at once, in the order of the queue."""
        ...

    def ended(self, sample: Sample) -> RoundChange:
        """Note that a sample's last turn has ended."""
        ...


class Rounds(Protocol):
    """A run's rounds. Invariant: `open` is called once for each step, in order."""

    def open(self, step: int) -> StepRound: ...


class WholeGroups:
    """Each step asks its own prompts, and trains on all of their responses."""

    def __init__(self, prompts: int, group: int) -> None:
        self._prompts, self._group = prompts, group

    def open(self, step: int) -> StepRound:
        first = step * self._prompts
        return _WholeRound(
            [Sample(first + prompt, sample) for prompt in range(self._prompts) for sample in range(self._group)]
        )


class _WholeRound:
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples, self._open = samples, len(samples)

    def begin(self) -> Sequence[Sample]:
        return self._samples

    def ended(self, sample: Sample) -> RoundChange:  # noqa: ARG002 - which one does not matter
        self._open -= 1
        return RoundChange(complete=not self._open)
