"""The trainer and driver of a simulated run: the real SDK, through every call that a trainer makes.

Its memory dies with its process; what it has on disk is `Journal`. A new life claims the run again and asks for the
same things, as the contract allows.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, Lease
from ebbtide.errors import EbbtideError, LeaseSuperseded, NotReady
from ebbtide.runtime import race
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutRequest,
    SubmitOutcome,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import Run
from ebbtide.types.tokens import token_count
from tests.simulation.plan import MOST, Plan, RunPlan, Wanted, weights_mark

TOKEN: Final = "a-token-of-tests"
COORDINATOR: Final = "127.0.0.1:7600"
STANDBY: Final = "127.0.0.1:7601"
RELAY: Final = "127.0.0.1:7610"


#: A run is cancelled so long after the batch behind which that is to happen.
_CANCEL_S: Final = 1.5


class Outlook:
    """What the trainers of all runs know of the faults."""

    def __init__(self) -> None:
        self.waited_for = False  # a fault waits for something to happen
        self.calm = False  # no fault is to come any more: the runs may end


class Journal:
    """What outlives a run's trainer, and what it was told: for the checks at the end."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.requests: dict[str, RolloutRequest] = {}  # as first submitted
        self.came: dict[str, dict[str, FinishedRollout]] = {}  # rollout -> cursor -> finish
        self.over: set[str] = set()  # the store said that these are over
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.trajectories: dict[str, set[str]] = {}  # episode -> cursors
        self.published = self.batches = 0
        self.ended: Run | None = None


class Trainer:
    def __init__(self, world: Plan, journal: Journal, outlook: Outlook, tell: Callable[[str], None]) -> None:
        self._world, self._plan, self._journal, self._outlook, self._tell = world, journal.plan, journal, outlook, tell
        self._name = f"trainer{self._plan.number}"
        self._over_changed = asyncio.Event()

    async def run(self) -> None:
        """Bring the run to its end. Raises what a trainer would step down for."""
        security = ClientSecurity(token=TOKEN)
        run_id = self._plan.run_id
        heads = f"{COORDINATOR},{STANDBY}" if self._world.standby else COORDINATOR
        async with Client(heads, RELAY, security=security, patience_s=90.0) as client:
            await client.submit(self._plan.spec, run_id)
            try:
                async with client.claim(run_id, "trainer", holder=self._name) as lease:
                    await race(self._lead(client, lease), self._collect(lease), self._commit(lease))
            except LeaseSuperseded:
                found = await client.run(run_id)
                if not found.status.ended:
                    raise
                self._journal.ended = found  # by this trainer, which was not told in time, or by one before it

    async def _lead(self, client: Client, lease: Lease) -> None:
        journal, outlook = self._journal, self._outlook
        for number, batch in enumerate(self._plan.batches):
            if number >= self._plan.least and number >= journal.batches:
                while not (outlook.calm or outlook.waited_for):  # noqa: ASYNC110 - it outlives this process
                    await asyncio.sleep(0.2)
                if outlook.calm:
                    break
            journal.batches = max(journal.batches, number + 1)
            newest = lease.run.newest
            if newest is None or newest.step < number:
                forgotten = newest is not None and journal.published > number
                await self._publish(lease, number)
                if forgotten:  # as the store's answer confirms: a process that was superseded meanwhile knows nothing
                    self._forget_pinned(batch)
            await self._submit(client, lease, number, batch)
            if number == self._plan.cancel_after:
                await asyncio.sleep(_CANCEL_S)
                journal.ended = await client.cancel(self._plan.run_id)
                return
            await self._until_over(batch, leave=number + 1 < self._plan.least)
            await asyncio.sleep(self._plan.gaps[number])
        await self._until_over([one for batch in self._plan.batches[: journal.batches] for one in batch], leave=False)
        while journal.ended is None:
            try:
                journal.ended = await lease.finish()
            except NotReady:
                await asyncio.sleep(0.2)

    def _forget_pinned(self, batch: list[Wanted]) -> None:
        """The store forgot a version, and whatever was submitted after it: nothing can be generated by that version."""
        for one in batch:
            if one.pinned:
                self._journal.requests.pop(one.request.rollout_id, None)

    async def _publish(self, lease: Lease, step: int) -> None:
        mark = weights_mark(self._plan.number, step)
        weights = {"w": np.full((64,), mark, dtype=np.float32), "b": np.arange(8, dtype=np.float32)}
        version = await lease.publish(weights, step=step, parent=lease.run.newest.version if lease.run.newest else 0)
        self._journal.published = step + 1
        lease.run = msgspec.structs.replace(lease.run, newest=version)
        self._tell(f"published version {version.version}")

    async def _submit(self, client: Client, lease: Lease, number: int, batch: list[Wanted]) -> None:
        journal, newest = self._journal, lease.run.newest
        assert newest is not None
        for one in batch:
            request = one.request
            if one.pinned:
                bounds = {"min_version": newest.version, "max_version": newest.version}
            else:
                bounds = {"min_version": max(1, newest.version - 1)}
            journal.requests.setdefault(request.rollout_id, msgspec.structs.replace(request, **bounds))
        requests = [journal.requests[one.request.rollout_id] for one in batch]
        outcomes = await lease.submit_rollouts(requests, step=number, first_step=min(number, self._first_open()))
        for one, outcome in zip(batch, outcomes, strict=True):
            if outcome is SubmitOutcome.COMPLETED:
                self._ended([one.request.rollout_id])
        self._tell(f"submitted batch {number}")
        name = batch[0].request.rollout_id
        if name not in journal.over:
            asyncio.get_running_loop().create_task(self._stream(client, name), name="stream tokens")
        doomed = [one.request.rollout_id for one in batch if one.fate == "cancelled"]
        if open_ := [name for name in doomed if name not in journal.over]:
            await asyncio.sleep(0.5)
            await lease.cancel_rollouts(open_)
            self._ended(open_)

    def _first_open(self) -> int:
        """The first batch that is not over."""
        over = self._journal.over
        batches = enumerate(self._plan.batches)
        return next(
            (number for number, batch in batches if any(one.request.rollout_id not in over for one in batch)), MOST
        )

    async def _until_over(self, batch: list[Wanted], *, leave: bool) -> None:
        """Wait for the batch, or, with `leave`, for most of it: then the next one begins beside its rest."""
        names = [one.request.rollout_id for one in batch]
        most = len(names) // 2 if leave and self._plan.least > 2 else 0
        while sum(name not in self._journal.over for name in names) > most:
            self._over_changed.clear()
            await self._over_changed.wait()

    async def _collect(self, lease: Lease) -> None:
        journal, groups = self._journal, dict[str, list[FinishedRollout]]()
        async for finish in lease.finished():
            journal.came.setdefault(finish.rollout_id, {})[finish.cursor] = finish
            group = groups.setdefault(finish.group_id, [])
            if all(one.rollout_id != finish.rollout_id for one in group):
                group.append(finish)
            wanted = self._plan.wanted[finish.rollout_id]
            if wanted.fate != "cancelled":
                await self._settle(lease, [finish], wanted.fate)
            elif finish.rollout_id in journal.over and self._world.forgetful:
                await lease.cancel_rollouts([finish.rollout_id])  # the store forgot that it was, and its lease died
        await asyncio.Event().wait()

    async def _settle(self, lease: Lease, group: list[FinishedRollout], fate: str) -> None:
        names = [one.rollout_id for one in group]
        if fate == "committed" and all(one.reason is not FinishReason.DEAD_LETTERED for one in group):
            await lease.complete_episodes(self._episode(one) for one in group)
        else:
            await lease.acknowledge(names, "" if fate in {"trained", "committed"} else fate)
        self._ended(names)

    def _episode(self, finish: FinishedRollout) -> Episode:
        request = self._journal.requests[finish.rollout_id]
        trajectory = Trajectory(
            episode_id=finish.episode_id,
            group_id=finish.group_id,
            step=0,
            group_size=1,
            prompt_ids=request.prompt_ids,
            tokens=finish.tokens,
            loss_mask=b"\1" * token_count(finish.tokens),
            reward=1.0,
        )
        return Episode(episode_id=finish.episode_id, rollout_ids=(finish.rollout_id,), trajectory=trajectory)

    async def _commit(self, lease: Lease) -> None:
        async for one in lease.trajectories():
            self._journal.trajectories.setdefault(one.episode_id, set()).add(one.cursor)
            await lease.commit([TrajectoryOutcome(cursor=one.cursor)])
        await asyncio.Event().wait()

    async def _stream(self, client: Client, name: str) -> None:
        """Read a rollout's tokens as they are stored."""
        chunks = self._journal.chunks[name] = []
        with suppress(EbbtideError):  # it was over, or the trainer goes
            async for chunk in client.stream_tokens(self._plan.run_id, name):
                chunks.append(chunk)  # noqa: PERF401 - they are looked at while they come

    def _ended(self, names: list[str]) -> None:
        self._journal.over.update(names)
        self._over_changed.set()
