"""Keeps a run's forecasts of lengths and the ranks of what it has queued, from what its `RunState` hears.

Evaluation and requests of gateways' clients are left out: their lengths are not those that a step waits for. A fault in
forecasts ends them for the run: it goes on in the order of its submission, with the lengths that were learnt by then.

Invariant: `forecasts` has the training rollouts that the run's queue and attempts have, but for those that `_unread` is
still to name after a mirror was read again. Lost with the process, and built anew when the mirror is read: see
`RunForecasts`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.forecasts.length_learner import LengthCurve, LengthQuantiles
from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts
from ebbtide.coordinator.forecasts.start_ranks import StartRanks
from ebbtide.coordinator.forecasts.step_eta import StepEta
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, Rank, RolloutQueue
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.types.run import RunSpec

log = telemetry.get_logger(__name__)
#: Rollouts of a mirror that was read again that are taken in one call: some five milliseconds of a core.
PAGE: Final = 512


class LengthForecasts:
    def __init__(self, run_id: str, spec: RunSpec) -> None:
        self._run_id, self._cap = run_id, spec.sampling.max_tokens
        self._ordered = spec.tail.order == "lengths"
        self.forecasts = RunForecasts(spec.batch.groups_per_step)
        self._ranks = StartRanks(self.forecasts)
        self.eta: Final = StepEta(self.forecasts)
        self._unread: Iterator[None] = iter(())
        self._named = True  # all that is open, since the mirror was last read again
        self._failed = False

    # What the run's state hears.

    def queued(self, one: QueuedRollout) -> Rank:
        """Note a rollout that is queued. Returns its rank in the queue."""
        if one.request or one.evaluation:
            return ()
        with self._harmless():
            if not self._failed:
                group = self._wait(one)
                return self._rank(one, group) if self._ordered else ()
        return (one.step, 0, 0) if self._ordered else ()

    def started(self, attempt: RunningAttempt, queue: RolloutQueue) -> None:
        """Note that a worker got a rollout."""
        if self._takes(attempt.rollout):
            with self._harmless():
                first = (before := self.forecasts.group(attempt.rollout.group)) is None or not before.begun
                group = self._run(attempt)
                if first and self._ordered:
                    self._rerank([group], queue)

    def finished(self, attempt: RunningAttempt, *, context: int = 0) -> None:
        """Note that the store has a rollout's whole response. `context`: at which the run's responses end, if known."""
        if self._takes(one := attempt.rollout):
            with self._harmless():
                whole = attempt.stored < attempt.max_tokens and not 0 < context <= attempt.length
                self.forecasts.finish(one.rollout_id, one.group, attempt.stored, whole=whole)

    def over(self, one: QueuedRollout) -> None:
        """Note that a rollout is over. Does nothing for one that has finished."""
        if self._takes(one):
            with self._harmless():
                self._ranks.left(one.rollout_id)
                self.forecasts.cancel(one.rollout_id, one.group)

    def reread(self, queue: RolloutQueue, running: Iterable[RunningAttempt]) -> None:
        """Take the open rollouts from a mirror that was read again: a page now, and one in each call of `renew`."""
        if not self._failed:
            self.forecasts.forget_open()
            self._named = False
            self._ranks.forget_waits()
            self._unread = self._reading(queue, list(running))
            with self._harmless():
                self._read_page()

    def clear(self) -> None:
        """Let go of what is open, and of what was still to be taken: it refers to the run."""
        self._unread = iter(())
        self.forecasts.forget_open()

    # What is decided by it.

    def renew(self, queue: RolloutQueue, now: float, *, heard: bool) -> bool:
        """Make some forecasts anew, rank what is queued by them, and estimate when the step ends. `heard`: some worker
        hears of forecasts; where none does and the queue is not ordered by them, none is made. Returns whether a mirror
        that was read again is still being taken instead, so that it is to be called again.
        """
        if self._failed:
            return False
        with self._harmless():
            if self._read_page():
                return True
            renewed = self.forecasts.renew(now, read=heard or self._ordered)
            if heard:
                self.eta.look(now)
            if self._ordered:
                self._rerank(renewed, queue)
                queue.rerank_all(self._ranks.overdue(now))
        return False

    def quantiles(self, one: QueuedRollout) -> LengthQuantiles | None:
        """Tokens that a rollout has still to come; None for those that are left out, and where nothing is forecast."""
        found = None
        with self._harmless():
            if self._takes(one) and (group := self.forecasts.group(one.group)) is not None:
                found = self.forecasts.quantiles(group, one.rollout_id)
        return found

    @property
    def curve(self) -> LengthCurve:
        """The run's lengths, whatever their groups: what is assumed of any run, until training's responses have taught
        something.
        """
        return self.forecasts.learner.curve

    def rest(self, one: QueuedRollout, made: int, budget: int | None) -> float:
        """Tokens that a rollout will probably still make: by its group where that is known, else by the run; at most
        `budget`.
        """
        quantiles = self.quantiles(one) if self.forecasts.known else None
        if quantiles is None:
            return self.curve.rest(made, budget)
        return quantiles.expected if budget is None else min(quantiles.expected, float(budget))

    def has_open(self, group: int) -> bool:
        """Whether a rollout of the group is queued or runs; True where that is not known."""
        if self._failed or not self._named:
            return True
        known = self.forecasts.group(group)
        return known is not None and known.open

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("no lengths are forecast for this run any more", run_id=self._run_id)
            self._failed = True
            self.forecasts, self._unread = RunForecasts(1, learner=self.forecasts.learner), iter(())

    def _takes(self, one: QueuedRollout) -> bool:
        return not (self._failed or one.request or one.evaluation)

    def _wait(self, one: QueuedRollout) -> KnownGroup:
        cap = one.made + one.budget if one.budget else self._cap
        if self._ordered:
            self._ranks.waits(one.rollout_id, one.step, one.since)
        return self.forecasts.wait(one.rollout_id, one.group, one, cap=cap, prompt=one.prompt)

    def _run(self, attempt: RunningAttempt) -> KnownGroup:
        one = attempt.rollout
        self._ranks.left(one.rollout_id)
        return self.forecasts.run(one.rollout_id, one.group, attempt, cap=attempt.max_tokens)

    def _read_page(self) -> bool:
        """Take some of what is open from a mirror that was read again. Returns whether there was as much."""
        return sum(1 for _ in islice(self._unread, PAGE)) == PAGE

    def _reading(self, queue: RolloutQueue, running: Sequence[RunningAttempt]) -> Iterator[None]:
        """Name what is open and still is by then, then rank what waits: each once all of its group are known."""
        for attempt in running:
            one = attempt.rollout
            if self._takes(one) and attempt.run.running.get(one.rollout_id) is attempt:
                self._run(attempt)
            yield
        for one in queue.training():
            self._wait(one)
            yield
        self.forecasts.settle_all()
        self._named = True
        ranks = dict[str, Rank]()
        for one in queue.training() if self._ordered else ():
            ranks[one.rollout_id] = self._rank_of(one)
            if len(ranks) == PAGE:
                queue.rerank_all(ranks)
                ranks.clear()
            yield
        queue.rerank_all(ranks)

    def _rerank(self, groups: Iterable[KnownGroup], queue: RolloutQueue) -> None:
        queue.rerank_all(
            {
                name: self._rank(one, group)
                for group in groups
                for name in group.waiting
                if (one := queue.get(name)) is not None
            }
        )

    def _rank_of(self, one: QueuedRollout) -> Rank:
        group = self.forecasts.group(one.group)
        return self._rank(one, group) if group is not None else (one.step, 0, 0)

    def _rank(self, one: QueuedRollout, group: KnownGroup) -> Rank:
        begun = one.made > 0 or one.turn > 0
        return self._ranks.rank(one.rollout_id, group, step=one.step, begun=begun, since=one.since)
