"""Submits all groups of a run, step by step, as soon as the announced versions allow, and evaluates versions between.

`GroupRunner` runs the episodes of one group side by side; it replaces failed ones, or shrinks or drops the group, as
the run says. A group's episodes are completed all at once, when all are decided: so every trajectory states its group's
true size, and a restarted driver finds a group either undecided or decided.

With dynamic sampling (`batch.dynamic_sampling`) a group whose rewards are all equal is dropped once it is whole, and
another prompt takes its place. That is reported before it is done, so a restarted driver draws the same.

`RoundSubmitter` plays the groups of a run whose steps train on the groups that are complete first, while the others
continue. `GroupRounds` decides. What it decided is reported before it is done: the groups that a step begins, and those
that it takes. So a driver that follows knows both.

Invariant: a group of `_runners` is open or complete in `_rounds`, or it was taken and its episodes are not complete
yet. All of it is lost with the process. The next driver rebuilds it from the run's events, and plays the groups again
through the finished rollouts that the coordinator still has.

An evaluation plays one pinned version on problems that are never trained on, apart from training's counts.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec

from ebbtide.client import Lease
from ebbtide.driver.coordinator_traffic import AlreadyCompleted, CoordinatorTraffic
from ebbtide.driver.episode_player import EpisodeEnding, EpisodePlan, EpisodePlayer
from ebbtide.driver.group_rounds import GroupRounds
from ebbtide.errors import NotReady
from ebbtide.rpc.backoff import pauses
from ebbtide.run_client import GROUP_DROPPED, GROUP_REDRAWN, ROUND_OPENED, ROUND_TAKEN, RunFailed, RunFollower
from ebbtide.step_pacing import VersionBounds, continued, evaluation_steps, open_steps, pinned, training_bounds
from ebbtide.telemetry import get_logger
from ebbtide.types.rollout import DropReason, Episode, RolloutKind
from ebbtide.types.run import RunEvent, RunSpec, SlotPriority

Setting = Literal["replace", "shrink", "drop"]

#: Tries at one sample: after three failures a fourth will not help.
MAX_TRIES: Final = 3
#: Group-normalised advantages need at least so many.
MIN_GROUP: Final = 2


class SampleState(Enum):
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


class SampleOutcome(NamedTuple):
    state: SampleState = SampleState.RUNNING  # of the sample's newest episode
    tries: int = 1


class GroupVerdict(Enum):
    WAIT = "wait"
    REPLACE = "replace"
    COMPLETE = "complete"
    DROP = "drop"


class GroupDecision(NamedTuple):
    verdict: GroupVerdict
    samples: tuple[int, ...] = ()  # indices: to retry for REPLACE, the group's trajectories for COMPLETE


def decide(samples: Sequence[SampleOutcome], *, setting: Setting) -> GroupDecision:
    """The verdict on a group whose episodes end one by one, some without a reward. Call again whenever a sample's state
    changes, until COMPLETE or DROP."""
    failed = _having(samples, SampleState.FAILED)
    again = tuple(index for index in failed if samples[index].tries < MAX_TRIES)
    if setting == "replace" and again:
        return GroupDecision(GroupVerdict.REPLACE, again)
    if _having(samples, SampleState.RUNNING):
        return GroupDecision(GroupVerdict.WAIT)
    scored = _having(samples, SampleState.SCORED)
    enough = len(samples) if setting == "drop" else MIN_GROUP
    return GroupDecision(GroupVerdict.COMPLETE, scored) if len(scored) >= enough else GroupDecision(GroupVerdict.DROP)


def _having(samples: Sequence[SampleOutcome], state: SampleState) -> tuple[int, ...]:
    return tuple(index for index, sample in enumerate(samples) if sample.state is state)


#: Characters of a failure's message in events: enough to recognise it.
EXCERPT: Final = 500


@dataclass(kw_only=True)
class GroupResult:
    trajectories: int = 0
    failures: list[EpisodeEnding] = field(default_factory=list)
    redrawn: int = 0  # groups before this one, in its place, whose rewards were all equal
    equal: bool = False  # its own are, too


class GroupRunner:
    """Runs group `place` of a step, and those that are drawn in its place.

    Invariant: `samples[k]` is the state of sample k's newest episode. `endings[k]` holds its trajectory once it is
    SCORED, unless a former driver completed it. Both are of the newest draw.
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
        redrawn: Container[str] = (),
    ) -> None:
        """`index`: the number of its problem; None: it follows from step and place. `redrawn`: groups for which a
        former driver drew others."""
        batch = player.spec.batch
        self._lease = lease
        self._player = player
        self._exchange = exchange
        self._step = step
        self._place, self._redrawn = place, redrawn
        self._index = step * batch.groups_per_step + place if index is None else index
        self._draw = 0
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

    @property
    def _id(self) -> str:
        return f"s{self._step}.g{self._place}" + (f".d{self._draw}" if self._draw else "")

    @property
    def _problem(self) -> int:
        """Its number: those of later draws are behind the ones of all first draws, and no two are equal."""
        batch, steps = self._player.spec.batch, self._player.spec.trainer.steps
        if not self._draw:
            return self._index
        return batch.groups_per_step * steps + self._index * batch.dynamic_sampling + self._draw - 1

    async def play(self) -> None:
        """Plays the group until its samples are decided, and others in its place while they teach nothing. Nothing of
        the last one is stored yet."""
        await self._play_draw()
        while self._id in self._redrawn or (self._draw < self._player.spec.batch.dynamic_sampling and self._is_equal()):
            await self._drop_draw()
            self._draw += 1
            self.samples = [SampleOutcome()] * len(self.samples)
            self.endings.clear()
            await self._play_draw()
        self.result.redrawn, self.result.equal = self._draw, self._is_equal()

    async def _play_draw(self) -> None:
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

    def _is_equal(self) -> bool:
        """Whether the group is complete, and its rewards are all equal. A former driver's are not known: it kept it."""
        rewards = [ending.trajectory.reward for ending in self.endings.values() if ending.trajectory is not None]
        whole = self._decision.verdict is GroupVerdict.COMPLETE and len(rewards) == len(self._decision.samples)
        return whole and max(rewards) == min(rewards)

    async def _drop_draw(self) -> None:
        """Drops a group for which another one is drawn."""
        reward = next((ending.trajectory.reward for ending in self.endings.values() if ending.trajectory), 0.0)
        message = f"group {self._id} has equal rewards, {reward:g}: another one is drawn"
        values = {"step": float(self._step), "reward": reward}
        await self._lease.report([RunEvent(kind=GROUP_REDRAWN, key=self._id, message=message, values=values)])
        failed = [_dropped(ending, ending.failure) for ending in self._failures() if ending.rollout_ids]
        equal = [_dropped(ending, DropReason.EQUAL_REWARDS) for ending in self.endings.values()]
        await self._exchange.complete(equal + failed)

    def _failures(self) -> list[EpisodeEnding]:
        """Those of the newest draw."""
        return [ending for ending in self.result.failures if ending.plan.group_id == self._id]

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
            index=self._problem,
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
        failed = [_dropped(ending, ending.failure) for ending in self._failures() if ending.rollout_ids]
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


Account = Callable[[int, Sequence[GroupResult]], Awaitable[None]]

#: Groups that one event names: their numbers stay far below the bytes of an event.
_NAMED: Final = 1024


class RoundSubmitter:
    def __init__(
        self,
        lease: Lease,
        player: EpisodePlayer,
        exchange: CoordinatorTraffic,
        following: RunFollower,
        account: Account,
    ) -> None:
        """`account` is told the results of each step's groups."""
        self._lease, self._player, self._exchange, self._following = lease, player, exchange, following
        self._account = account
        spec = player.spec
        self._steps = spec.trainer.steps
        self._rounds = GroupRounds(
            groups_per_step=spec.batch.groups_per_step,
            steps=self._steps,
            max_age=spec.batch.max_staleness,
            excess=spec.tail.rounds_excess,
        )
        self._begun: dict[int, tuple[int, int]] = {}  # group -> the step that began it, and its place there
        self._runners: dict[int, GroupRunner] = {}
        self._changed = asyncio.Event()  # a group has become whole

    async def run(self) -> None:
        """Plays all steps from the newest version's on. What steps before it took is complete."""
        first = max(self._following.versions, default=0)
        again = self._restore(first)
        async with asyncio.TaskGroup() as playing:
            for group in self._rounds.on_their_way:
                self._play(playing, group)
            for step in range(first, self._steps):
                await self._following.until(partial(self._is_announced, step))
                await self._open(playing, step, keep=again if step == first else ())
                results = await self._replay(again) if step == first else []
                await self._account(step, results + await self._fill(step))

    def _is_announced(self, step: int) -> bool:
        return step in self._following.versions

    def _restore(self, step: int) -> Sequence[int]:
        """Takes up what former drivers reported. Returns the groups that `step` took: they may not be complete."""
        before = 0
        for begun_by, begun in sorted(self._following.begun.items()):
            self._note_begun(begun_by, range(before, begun))
            before = begun
        taken = self._following.taken
        of_step = [group for group, by in taken.items() if by == step]
        begun_by_group = {group: by for group, (by, _) in self._begun.items()}
        self._rounds.restore(begun_by_group, taken, step=step, of_step=len(of_step))
        return of_step

    def _note_begun(self, step: int, groups: range) -> None:
        self._begun.update((group, (step, group - groups.start)) for group in groups)

    async def _open(self, playing: asyncio.TaskGroup, step: int, *, keep: Sequence[int]) -> None:
        """Begins the step's own groups. `keep`: groups whose rollouts are asked for again beside those on their way."""
        carried = self._rounds.ages(step)
        begun = self._rounds.open(step)
        if len(begun):
            self._note_begun(step, range(begun[0], begun[-1] + 1))
            values: dict[str, float] = {"step": step, "begun": self._rounds.begun, "carried": len(carried)}
            values["oldest"] = max(carried, default=0)
            message = f"step {step} begins {len(begun)} groups; {len(carried)} of earlier steps are in flight"
            event = RunEvent(kind=ROUND_OPENED, key=str(step), message=message, values=values)
            await self._lease.report([event])
        # Steps before this one are trained: no driver asks for more rollouts of groups that they took.
        open_steps = [self._begun[group][0] for group in (*self._rounds.on_their_way, *keep)]
        self._exchange.first_step = min(open_steps, default=step)
        for group in begun:
            self._play(playing, group)

    def _play(self, playing: asyncio.TaskGroup, group: int) -> None:
        playing.create_task(self._until_whole(group))

    async def _until_whole(self, group: int) -> None:
        await self._runner(group).play()
        self._rounds.whole(group)
        self._changed.set()

    def _runner(self, group: int) -> GroupRunner:
        step, place = self._begun[group]
        bounds = continued(self._following.versions, step=step)
        made = GroupRunner(
            self._lease,
            self._player,
            self._exchange,
            step=step,
            place=place,
            bounds=bounds,
            index=group,
            redrawn=self._following.redrawn,
        )
        self._runners[group] = made
        return made

    async def _replay(self, groups: Sequence[int]) -> list[GroupResult]:
        """Completes groups that a former driver took for the first step."""
        await asyncio.gather(*(self._runner(group).play() for group in groups))
        return await self._store(groups, max(self._following.versions, default=0))

    async def _fill(self, step: int) -> list[GroupResult]:
        """Takes whole groups until the step has all of its own."""
        results: list[GroupResult] = []
        while True:
            groups = self._rounds.take()
            for some in (groups[at : at + _NAMED] for at in range(0, len(groups), _NAMED)):
                await self._lease.report([_taken(step, some)])
            results += await self._store(groups, step)
            if self._rounds.complete:
                return results
            await self._changed.wait()
            self._changed.clear()

    async def _store(self, groups: Sequence[int], step: int) -> list[GroupResult]:
        runners = [self._runners.pop(group) for group in groups]
        return list(await asyncio.gather(*(runner.store(step) for runner in runners)))


def _taken(step: int, groups: Sequence[int]) -> RunEvent:
    return RunEvent(
        kind=ROUND_TAKEN,
        key=f"{step}.{groups[0]}",
        message=f"step {step} trains on {len(groups)} groups",
        values={"step": step},
        labels={"groups": " ".join(map(str, groups))},
    )


#: `EvaluationSpec.priority` -> priority in an engine; lower goes first, and training's is its step. The default is
#: `before`, as the next step's training waits for the workers that an evaluation's version keeps.
_PRIORITY: Final[dict[SlotPriority, Callable[[int], int]]] = {
    SlotPriority.BEFORE: lambda _step: -1,
    SlotPriority.SHARED: lambda step: step,
    SlotPriority.BACKGROUND: lambda _step: 1 << 30,
}


@dataclass
class EvaluationScore:
    """Sums up the problems of one evaluation."""

    problems: int = 0
    failed: int = 0
    right: float = 0.0
    asked: float = 0.0
    reward: float = 0.0
    tokens: int = 0
    episodes: list[Episode] = field(default_factory=list)

    def add(self, ending: EpisodeEnding) -> None:
        self.episodes.append(Episode(episode_id=ending.plan.episode_id, rollout_ids=ending.rollout_ids))
        if (trajectory := ending.trajectory) is None:
            self.failed += 1
            return
        self.problems += 1
        # Without questions, the reward counts.
        self.asked += trajectory.metrics.get("asked", 1.0)
        self.right += trajectory.metrics.get("right", 0.0 if "asked" in trajectory.metrics else trajectory.reward)
        self.reward += trajectory.reward
        self.tokens += trajectory.loss_mask.count(1)

    def values(self) -> dict[str, float]:
        """`accuracy` is the share of answers right; `mean_length` counts sampled tokens per problem."""
        values = {"problems": float(self.problems), "answers": self.asked, "failed": float(self.failed)}
        if self.asked:
            values["accuracy"] = self.right / self.asked
        if self.problems:
            values["mean_reward"] = self.reward / self.problems
            values["mean_length"] = self.tokens / self.problems
        return values


async def evaluate(player: EpisodePlayer, *, step: int, bounds: VersionBounds) -> tuple[RunEvent, list[Episode]]:
    """Plays all problems against the version in `bounds`, that of `step`.

    Returns the event to report, and the episodes to complete afterwards: a driver that restarts in between finds the
    event and does not evaluate again.
    """
    async with asyncio.TaskGroup() as group:
        playing = [
            group.create_task(_play(player, _plan(player.spec, step, index, bounds)))
            for index in range(player.spec.evaluation.problems)
        ]
    score = EvaluationScore()
    for task in playing:
        if (ending := task.result()) is not None:
            score.add(ending)
    values = {"step": float(step), "version": float(bounds.maximum), **score.values()}
    message = f"accuracy {values['accuracy']:.3f}" if "accuracy" in values else "no problem could be asked"
    event = RunEvent(kind="evaluation", key=str(step), message=f"{message}, {score.problems} problems", values=values)
    return event, [episode for episode in score.episodes if episode.rollout_ids]


def _plan(spec: RunSpec, step: int, index: int, bounds: VersionBounds) -> EpisodePlan:
    return EpisodePlan(
        episode_id=f"e{step}.p{index}",
        group_id=f"e{step}",
        split="eval",
        index=index,
        step=step,
        kind=RolloutKind.EVAL,
        bounds=bounds,
        priority=_PRIORITY[spec.evaluation.priority](step),
    )


async def _play(player: EpisodePlayer, plan: EpisodePlan) -> EpisodeEnding | None:
    try:
        return await player.play(plan)
    except AlreadyCompleted:  # a former driver reported it
        return None


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
        runner = partial(GroupRunner, self._lease, self._player, self._exchange, step=step, bounds=bounds)
        groups = [runner(place=place, redrawn=self._following.redrawn) for place in range(batch.groups_per_step)]
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
        await self._report_draws(step, results)
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

    async def _report_draws(self, step: int, results: Sequence[GroupResult]) -> None:
        """Reports how many groups of a step were dropped for their equal rewards, and how many have such after all."""
        if not self._spec.batch.dynamic_sampling:
            return
        dropped, equal = sum(one.redrawn for one in results), sum(one.equal for one in results)
        values = {"step": float(step), "dropped": float(dropped), "equal": float(equal), "groups": float(len(results))}
        text = (
            f"{dropped} groups of step {step} were dropped for equal rewards; {equal} of {len(results)} still have such"
        )
        await self._lease.report([RunEvent(kind="dynamic_sampling", key=str(step), message=text, values=values)])
