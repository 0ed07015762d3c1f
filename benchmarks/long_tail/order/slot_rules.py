"""Rules that say which waiting sample gets a free slot: published ones, and one that knows true lengths."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from benchmarks.rivals.seer_start_rule import BufferedRequest, SeerStartRule


class SlotSample(Struct, eq=False, kw_only=True):
    """A sample of the step. `began`: when its present chunk began; None: it waits. Times and lengths in tokens."""

    place: int
    group: int
    length: int
    probe: bool  # the first of its group
    made: int = 0
    began: int | None = None

    def made_by(self, now: int) -> int:
        return self.made if self.began is None else self.made + now - self.began

    @property
    def ended(self) -> bool:
        return self.made >= self.length


class SlotRule(Protocol):
    """A rule for one step."""

    def chunk_over(self, sample: SlotSample, now: int) -> None:
        """Note that a sample's chunk, or its response, has ended."""
        ...

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample: ...


class InOrder:
    """Whole groups one after another."""

    def chunk_over(self, sample: SlotSample, now: int) -> None: ...

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample:
        del now
        return min(waiting, key=lambda one: (-one.made, one.place))


class TrueLengths:
    """The sample with the most tokens to come."""

    def chunk_over(self, sample: SlotSample, now: int) -> None: ...

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample:
        del now
        return max(waiting, key=lambda one: (one.length - one.made, -one.place))


class PublishedSeer:
    def __init__(self, cap: int) -> None:
        self._rule = SeerStartRule(cap)

    def chunk_over(self, sample: SlotSample, now: int) -> None:
        del now
        if sample.ended:
            self._rule.finished(sample.group, sample.length)

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample:
        del now
        by_place = {one.place: one for one in waiting}
        found = self._rule.pick([BufferedRequest(one.place, one.group, one.made, one.probe) for one in waiting])
        return by_place[found.place]


#: Makes a rule for the samples of a step.
RuleMaker = Callable[[Sequence[SlotSample]], SlotRule]
