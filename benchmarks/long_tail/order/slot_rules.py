"""Rules that say which waiting sample gets a free slot: published ones, Ebbtide's, and one that knows true lengths."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from ebbtide.scheduling.long_tail.length_learner import LengthLearner, UnfinishedGroup
from ebbtide.scheduling.long_tail.start_order import StartOrder, WaitingSample
from ebbtide.simulator.rivals.seer_start_rule import BufferedRequest, SeerStartRule


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


class PredictedLengths:
    """`StartOrder` with forecasts of `learner`. A group's forecast is made anew when one of its samples ended or came
    back.
    """

    def __init__(self, learner: LengthLearner, samples: Sequence[SlotSample], cap: int) -> None:
        self._learner, self._cap = learner, cap
        self._groups: dict[int, list[SlotSample]] = {}
        for sample in samples:
            self._groups.setdefault(sample.group, []).append(sample)
        self._rests: dict[int, float] = {}  # by place, of those that wait

    def chunk_over(self, sample: SlotSample, now: int) -> None:
        self._foresee(sample.group, now)

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample:
        for one in waiting:
            if one.place not in self._rests:
                self._foresee(one.group, now)
        by_name = {str(one.place): one for one in waiting}
        order = StartOrder((self._waiting(one) for one in waiting), 0.0)
        return by_name[order.take(0, slots=1)[0].sample]

    def _waiting(self, one: SlotSample) -> WaitingSample:
        others = (other for other in self._groups[one.group] if other is not one)
        return WaitingSample(
            sample=str(one.place),
            group=str(one.group),
            rest=self._rests[one.place],
            longest_rest=self._rests[one.place],
            kv_tokens=0,
            since_s=0.0,
            place=one.place,
            probed=any(other.made or other.began is not None for other in others),
        )

    def _foresee(self, group: int, now: int) -> None:
        samples = self._groups[group]
        open_ = [one for one in samples if not one.ended]
        forecast = self._learner.forecast(
            UnfinishedGroup(
                finished=[one.length for one in samples if one.ended and one.length < self._cap],
                stopped=[one.length for one in samples if one.ended and one.length >= self._cap],
                made=[one.made_by(now) for one in open_],
                cap=self._cap,
            )
        )
        for one in open_:
            if one.began is None:
                self._rests[one.place] = forecast.rest(one.made)


#: Makes a rule for the samples of a step.
RuleMaker = Callable[[Sequence[SlotSample]], SlotRule]
