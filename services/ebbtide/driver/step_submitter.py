"""Submits all groups of a run, step by step, as soon as the announced versions allow."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from ebbtide.claimed_runs.run_loop import RunFailed, RunFollower
from ebbtide.client import Lease
from ebbtide.driver.coordinator_traffic import CoordinatorTraffic
from ebbtide.driver.episode_player import EpisodePlayer
from ebbtide.driver.evaluation import evaluate
from ebbtide.driver.group_runner import EXCERPT, GroupResult, GroupRunner
from ebbtide.driver.rounds.round_submitter import RoundSubmitter
from ebbtide.errors import NotReady
from ebbtide.rpc.backoff import pauses
from ebbtide.scheduling.steps.step_pacing import evaluation_steps, open_steps, pinned, training_bounds
from ebbtide.telemetry import get_logger
from ebbtide.types.rollout import DropReason
from ebbtide.types.run import RunEvent

log = get_logger(__name__)


class StepSubmitter:
    """Drives one run under one lease."""

    def __init__(
        self, lease: Lease, player: EpisodePlayer, exchange: CoordinatorTraffic, following: RunFollower
    ) -> None:
        self._lease = lease
        self._player = player
        self._exchange = exchange
        self._following = following
        self._spec = player.spec
        self._next = 0  # step to begin
        self._playing: set[int] = set()

    async def run(self) -> None:
        """Drives the run's training and evaluation, and ends the run."""
        await self._following.catch_up(self._lease)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._train() if self._spec.tail.rounds == "off" else self._rounds().run())
            tasks.create_task(self._evaluate())
        await self._finish()

    async def _train(self) -> None:
        """Plays the groups of each step from the newest version's on; the groups of earlier steps are complete."""
        first = max(self._following.versions, default=0)
        async with asyncio.TaskGroup() as steps:
            for step in range(first, self._spec.trainer.steps):
                self._next = step
                await self._following.until(partial(self._is_open, step))
                self._playing.add(step)
                steps.create_task(self._step(step))

    def _rounds(self) -> RoundSubmitter:
        return RoundSubmitter(self._lease, self._player, self._exchange, self._following, self._account)

    async def _evaluate(self) -> None:
        """Runs each planned evaluation without a report, once its version is announced."""
        plan, every = self._spec.evaluation, self._spec.evaluation.every
        for step in evaluation_steps(steps=self._spec.trainer.steps, every=every) if plan.problems else ():
            if step in self._following.evaluated:
                continue
            await self._following.until(partial(self._is_announced, step))
            bounds = pinned(self._following.versions, step=step)
            event, episodes = await evaluate(self._player, step=step, bounds=bounds)
            await self._lease.report([event])
            await self._exchange.complete(episodes)
            log.info("evaluated", step=step, result=event.message)

    async def _finish(self) -> None:
        """Ends the run once the trainer has committed all of it.

        Cancels orphaned rollouts, which a former driver submitted where an environment took another turn.
        """
        for pause in pauses(first_s=0.05, cap_s=1.0):
            if orphans := list(self._exchange.orphans):
                await self._lease.cancel_rollouts(orphans, DropReason.CANCELLED)
                self._exchange.orphans.clear()
            try:
                await self._lease.finish()
            except NotReady:
                await asyncio.sleep(pause)
            else:
                return

    def _is_open(self, step: int) -> bool:
        limits = {"steps": self._spec.trainer.steps, "max_staleness": self._spec.batch.max_staleness}
        return step in open_steps(self._following.versions, **limits)

    def _is_announced(self, step: int) -> bool:
        return step in self._following.versions

    async def _step(self, step: int) -> None:
        batch = self._spec.batch
        bounds = training_bounds(self._following.versions, step=step, max_staleness=batch.max_staleness)
        groups = [
            GroupRunner(self._lease, self._player, self._exchange, step=step, place=place, bounds=bounds)
            for place in range(batch.groups_per_step)
        ]
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(group.run()) for group in groups]
        await self._account(step, [task.result() for task in playing])
        self._playing.remove(step)
        # A later driver begins at the newest version's step: the trainer had all groups of the steps before.
        self._exchange.first_step = min({*self._playing, self._next, max(self._following.versions)})

    async def _account(self, step: int, results: Sequence[GroupResult]) -> None:
        """Reports scorings that were cut, and failures.

        Raises `RunFailed` if a step has no trajectory: the whole environment fails.
        """
        await self._report_scorings(step)
        failures = [failure for result in results for failure in result.failures]
        if not failures:
            return
        last = f"{failures[-1].plan.episode_id}: {failures[-1].failure}: {failures[-1].message}"[:EXCERPT]
        if not any(result.trajectories for result in results):
            raise RunFailed(f"every episode of step {step} failed; the last: {last}")
        reasons = {reason: float(count) for reason, count in Counter(failure.failure for failure in failures).items()}
        message = f"{len(failures)} episodes of step {step} failed; the last: {last}"
        await self._lease.report([RunEvent(kind="warning", key=f"failures.{step}", message=message, values=reasons)])
        log.warning("episodes failed", step=step, last=last, reasons=reasons)

    async def _report_scorings(self, step: int) -> None:
        """Reports the scorings that were cut since the last report, if there are any."""
        counts = self._player.scorings()
        if cut := counts.get("out_of_time", 0.0):
            text = f"{cut:g} of {sum(counts.values()):g} responses scored out of time"
            await self._lease.report([RunEvent(kind="rewards", key=str(step), message=text, values=counts)])
