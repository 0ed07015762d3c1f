"""Runs the episodes of one group side by side; replaces failed ones, or shrinks or drops the group, as the run says."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ebbtide.claimed_runs.run_loop import GROUP_DROPPED
from ebbtide.client import Lease
from ebbtide.driver.coordinator_traffic import AlreadyCompleted, CoordinatorTraffic
from ebbtide.driver.episode_player import EpisodeEnding, EpisodePlan, EpisodePlayer
from ebbtide.scheduling.steps.group_policy import GroupDecision, GroupVerdict, SampleOutcome, SampleState, decide
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.types.rollout import DropReason, Episode, RolloutKind
from ebbtide.types.run import RunEvent

#: Characters of a failure's message in events: enough to recognise it.
EXCERPT: Final = 500


@dataclass(kw_only=True)
class GroupResult:
    trajectories: int = 0
    failures: list[EpisodeEnding] = field(default_factory=list)


class GroupRunner:
    """Runs group `place` of a step.

    Invariant: `samples[k]` is the state of sample k's newest episode. `endings[k]` holds its trajectory once it is
    SCORED, unless a former driver completed it.
    """

    def __init__(
        self,
        lease: Lease,
        player: EpisodePlayer,
        exchange: CoordinatorTraffic,
        *,
        step: int,
        place: int,
        bounds: VersionBounds,
        index: int | None = None,
    ) -> None:
        """`index`: the number of its problem; None: it follows from step and place."""
        batch = player.spec.batch
        self._lease = lease
        self._player = player
        self._exchange = exchange
        self._step = step
        self._id = f"s{step}.g{place}"
        self._index = step * batch.groups_per_step + place if index is None else index
        self._bounds = bounds
        self._setting = batch.incomplete_group
        self.samples = [SampleOutcome()] * batch.group_size
        self.endings: dict[int, EpisodeEnding] = {}
        self.result = GroupResult()
        self._decision = GroupDecision(GroupVerdict.WAIT)

    async def run(self) -> GroupResult:
        """Plays the group to its end. Returns once that is stored."""
        await self.play()
        return await self.store(self._step)

    async def play(self) -> None:
        """Plays the group until its samples are decided. Nothing of it is stored yet."""
        running = {self._start(sample): sample for sample in range(len(self.samples))}
        try:
            while (decision := decide(self.samples, setting=self._setting)).verdict in {
                GroupVerdict.WAIT,
                GroupVerdict.REPLACE,
            }:
                for sample in decision.samples:
                    self.samples[sample] = SampleOutcome(tries=self.samples[sample].tries + 1)
                    running[self._start(sample)] = sample
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take(running.pop(task), task)
        finally:
            for task in running:
                task.cancel()
        self._decision = decision

    async def store(self, step: int) -> GroupResult:
        """Completes the episodes of a group that was played, as some of `step`."""
        if self._decision.verdict is GroupVerdict.DROP:
            await self._lease.report([self._dropping(step)])
        await self._exchange.complete(self._episodes(self._decision, step))
        return self.result

    def _start(self, sample: int) -> "asyncio.Task[EpisodeEnding]":
        tries = self.samples[sample].tries
        again = f".r{tries - 1}" if tries > 1 else ""
        plan = EpisodePlan(
            episode_id=f"{self._id}.{sample}{again}",
            group_id=self._id,
            split="train",
            index=self._index,
            step=self._step,
            kind=RolloutKind.TRAIN,
            bounds=self._bounds,
            priority=self._step,
        )
        return asyncio.create_task(self._player.play(plan))

    def _take(self, sample: int, task: "asyncio.Task[EpisodeEnding]") -> None:
        try:
            ending = task.result()
        except AlreadyCompleted:
            self.samples[sample] = self.samples[sample]._replace(state=SampleState.SCORED)
            return
        if ending.trajectory is None:
            self.result.failures.append(ending)
            self.samples[sample] = self.samples[sample]._replace(state=SampleState.FAILED)
        else:
            self.endings[sample] = ending
            self.samples[sample] = self.samples[sample]._replace(state=SampleState.SCORED)

    def _episodes(self, decision: GroupDecision, step: int) -> list[Episode]:
        """Returns the episodes to store, failures last; an episode without rollouts needs no end.

        If a driver dies between two calls, the next one takes completed episodes for scored ones. So failures may be
        completed only after all scored episodes.
        """
        failed = [_dropped(ending, ending.failure) for ending in self.result.failures if ending.rollout_ids]
        if decision.verdict is GroupVerdict.DROP:
            return [_dropped(ending, DropReason.GROUP_INCOMPLETE) for ending in self.endings.values()] + failed
        self.result.trajectories = size = len(decision.samples)
        return [_scored(ending, size, step) for ending in self.endings.values()] + failed

    def _dropping(self, step: int) -> RunEvent:
        last = self.result.failures[-1]
        return RunEvent(
            kind=GROUP_DROPPED,
            key=self._id,
            message=f"group {self._id} was dropped: {last.failure}: {last.message}"[:EXCERPT],
            values={"step": float(step)},
        )


def _scored(ending: EpisodeEnding, size: int, step: int) -> Episode:
    assert ending.trajectory is not None  # noqa: S101 - what SCORED means
    return Episode(
        episode_id=ending.plan.episode_id,
        rollout_ids=ending.rollout_ids,
        trajectory=msgspec.structs.replace(ending.trajectory, group_size=size, step=step),
    )


def _dropped(ending: EpisodeEnding, reason: str) -> Episode:
    return Episode(episode_id=ending.plan.episode_id, rollout_ids=ending.rollout_ids, drop_reason=reason)
