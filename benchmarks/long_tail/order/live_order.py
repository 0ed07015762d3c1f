"""Starts samples as a coordinator's queue does, by its code: a sample that has begun keeps its slot until its end."""

from collections.abc import Sequence

from benchmarks.long_tail.order.slot_rules import SlotSample
from ebbtide.coordinator.forecasts.length_learner import LengthLearner
from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts
from ebbtide.coordinator.forecasts.start_ranks import StartRanks
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.step_pacing import VersionBounds

#: A moment of the model is a chunk's end. Live, several renewals lie between two of them.
_RENEWALS = 4


class _Began:
    """A sample in a slot, as the forecasts see it."""

    def __init__(self, sample: SlotSample, rule: "LiveOrder") -> None:
        self._sample, self._rule = sample, rule

    @property
    def made(self) -> int:
        return self._sample.made_by(self._rule.now)


class LiveOrder:
    """The order of `[tail] order = "lengths"`."""

    def __init__(self, learner: LengthLearner, samples: Sequence[SlotSample], cap: int) -> None:
        self.now, self._cap, self._moment = 0, cap, 0.0
        self._forecasts = RunForecasts(len({one.group for one in samples}), learner)
        self._ranks, self._queue = StartRanks(self._forecasts), RolloutQueue()
        self._samples = {str(one.place): one for one in samples}
        self._places: dict[int, int] = {}  # of each group's first sample
        for one in samples:
            self._places.setdefault(one.group, one.place)
            queued = QueuedRollout(
                rollout_id=str(one.place), episode_id=str(one.place), bounds=VersionBounds(0, 0), length=0,
                place=one.place, group=self._places[one.group], budget=cap,
            )  # fmt: skip
            group = self._forecasts.wait(queued.rollout_id, queued.group, queued, cap=cap)
            rank = self._ranks.rank(queued.rollout_id, group, step=0, begun=False, since=0.0)
            self._queue.add(queued, rank)

    def chunk_over(self, sample: SlotSample, now: int) -> None:
        self.now = now
        if sample.ended:
            place = self._places[sample.group]
            self._forecasts.finish(str(sample.place), place, sample.length, whole=sample.length < self._cap)
        self._renew()

    def pick(self, waiting: Sequence[SlotSample], now: int) -> SlotSample:
        self.now = now
        going_on = next((one for one in waiting if one.made), None)
        if going_on is not None:
            return going_on
        first = next(iter(self._queue))
        self._queue.take(first.rollout_id)
        sample = self._samples[first.rollout_id]
        group = self._forecasts.run(first.rollout_id, first.group, _Began(sample, self), cap=self._cap)
        self._rerank(group)
        return sample

    def _renew(self) -> None:
        for _ in range(_RENEWALS):
            self._moment += 1.0
            for group in self._forecasts.renew(self._moment):
                self._rerank(group)

    def _rerank(self, group: KnownGroup) -> None:
        for name in list(group.waiting):
            self._queue.rerank(name, self._ranks.rank(name, group, step=0, begun=False, since=0.0))
