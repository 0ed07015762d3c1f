"""Keeps a run's forecasts of lengths and the ranks of what it has queued, from what its `RunState` hears.

Evaluation and requests of gateways' clients are left out: their lengths are not those that a step waits for.

Invariant: `forecasts` has the training rollouts that the run's queue and attempts have. Lost with the process, and
built anew when the mirror is read: see `RunForecasts`.
"""

from collections.abc import Iterable
from typing import Final

from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout, Rank, RolloutQueue
from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook
from ebbtide.scheduling.long_tail.outlook.known_group import KnownGroup
from ebbtide.scheduling.long_tail.outlook.run_forecasts import RunForecasts
from ebbtide.scheduling.long_tail.outlook.start_ranks import StartRanks
from ebbtide.scheduling.long_tail.outlook.step_judge import StepJudge
from ebbtide.types.run import RunSpec


class RunTail:
    def __init__(self, spec: RunSpec) -> None:
        self._cap = spec.sampling.max_tokens
        self._ordered = spec.tail.order == "lengths"
        self.forecasts: Final = RunForecasts(spec.batch.groups_per_step)
        self._ranks = StartRanks(self.forecasts)
        self.judge: Final = StepJudge(self.forecasts)

    # What the run's state hears.

    def queued(self, one: QueuedRollout) -> Rank:
        """Note a rollout that is queued. Returns its rank in the queue."""
        if one.request or one.evaluation:
            return ()
        cap = one.made + one.budget if one.budget else self._cap
        group = self.forecasts.wait(one.rollout_id, one.group, one, cap=cap, prompt=one.prompt)
        if not self._ordered:
            return ()
        self._ranks.waits(one.rollout_id, one.step, one.since)
        return self._rank(one, group)

    def started(self, attempt: RunningAttempt, queue: RolloutQueue) -> None:
        """Note that a worker got a rollout."""
        one = attempt.rollout
        if one.request or one.evaluation:
            return
        first = (before := self.forecasts.group(one.group)) is None or not before.begun
        group = self.forecasts.run(one.rollout_id, one.group, attempt, cap=attempt.max_tokens)
        if first and self._ordered:
            self._rerank(group, queue)

    def finished(self, attempt: RunningAttempt, *, context: int = 0) -> None:
        """Note that the store has a rollout's whole response. `context`: at which the run's responses end, if known."""
        one = attempt.rollout
        if not (one.request or one.evaluation):
            whole = attempt.stored < attempt.max_tokens and not 0 < context <= attempt.length
            self.forecasts.finish(one.rollout_id, one.group, attempt.stored, whole=whole)

    def over(self, one: QueuedRollout) -> None:
        """Note that a rollout is over. Does nothing for one that has finished."""
        if not (one.request or one.evaluation):
            self.forecasts.cancel(one.rollout_id, one.group)

    def reread(self, queue: RolloutQueue, running: Iterable[RunningAttempt]) -> None:
        """Take the open rollouts from a mirror that was read again."""
        self.forecasts.forget_open()
        self._ranks.forget_waits()
        for attempt in running:
            self.started(attempt, queue)
        for one in queue:
            self.queued(one)
        self.forecasts.settle_all()
        if self._ordered:
            queue.rank_training(self._rank_of)

    # What is decided by it.

    def renew(self, queue: RolloutQueue, now: float, *, heard: bool) -> None:
        """Make some forecasts anew, rank what is queued by them, and judge when the step ends. `heard`: some worker
        hears of forecasts; where none does and the queue is not ordered by them, none is made.
        """
        renewed = self.forecasts.renew(now, read=heard or self._ordered)
        if heard:
            self.judge.look(now)
        if not self._ordered:
            return
        for group in renewed:
            self._rerank(group, queue)
        for rollout_id, rank in self._ranks.overdue(now):
            queue.rerank(rollout_id, rank)

    def outlook(self, one: QueuedRollout) -> LengthOutlook | None:
        """Tokens that a rollout has still to come; None for those that are left out."""
        group = self.forecasts.group(one.group)
        if group is None or one.request or one.evaluation:
            return None
        return self.forecasts.outlook(group, one.rollout_id)

    def _rerank(self, group: KnownGroup, queue: RolloutQueue) -> None:
        for rollout_id in list(group.waiting):
            if (one := queue.get(rollout_id)) is not None:
                queue.rerank(rollout_id, self._rank(one, group))

    def _rank_of(self, one: QueuedRollout) -> Rank:
        group = self.forecasts.group(one.group)
        return self._rank(one, group) if group is not None else (one.step, 0, 0)

    def _rank(self, one: QueuedRollout, group: KnownGroup) -> Rank:
        begun = one.made > 0 or one.turn > 0
        return self._ranks.rank(one.rollout_id, group, step=one.step, begun=begun, since=one.since)
