"""Plays the groups of a run whose steps train on the groups that are whole first, while the others go on.

`GroupRounds` decides. What it decided is reported before it is done: the groups that a step begins, and those that it
takes. So a driver that follows knows both.

Invariant: a group of `_runners` is open or whole in `_rounds`, or it was taken and its episodes are not complete yet.
All of it is lost with the process. The next driver rebuilds it from the run's events, and plays the groups again
through the finished rollouts that the coordinator still has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from ebbtide.claimed_runs.run_loop import ROUND_OPENED, ROUND_TAKEN, RunFollower
from ebbtide.client import Lease
from ebbtide.driver.coordinator_traffic import CoordinatorTraffic
from ebbtide.driver.episode_player import EpisodePlayer
from ebbtide.driver.group_runner import GroupResult, GroupRunner
from ebbtide.scheduling.long_tail.rounds.group_rounds import GroupRounds
from ebbtide.scheduling.steps.step_pacing import continued
from ebbtide.types.run import RunEvent

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
            message = f"step {step} begins {len(begun)} groups beside {len(carried)} of former steps"
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
            self._lease, self._player, self._exchange, step=step, place=place, bounds=bounds, index=group
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
