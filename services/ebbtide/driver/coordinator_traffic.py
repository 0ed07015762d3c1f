"""The driver's traffic with the coordinator: many small asks in, few large calls out; finishes back to who asked.

Invariant: a rollout id has at most one waiter, registered before its submit is sent, so no finish passes it by.
Finishes that nobody waits for are kept in `orphans`: after a restart they come before their submits do. When the
process dies, all of this is rebuilt: the coordinator keeps what was submitted, and sends each finish until it is
completed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from ebbtide.claimed_runs.run_failure import RunFailed
from ebbtide.client import Lease
from ebbtide.errors import AlreadyExists, EbbtideError, InvalidRequest, NoCapacity
from ebbtide.types.rollout import Episode, FinishedRollout, RolloutRequest, SubmitOutcome

A = TypeVar("A")
R = TypeVar("R")


#: No room for so long, with nothing in flight and training waiting: a trainer has committed long since what it could.
_FULL_S: Final = 300.0


class AlreadyCompleted(EbbtideError):
    """A predecessor of this driver has completed the rollout's episode."""


class CallBatches(Generic[A, R]):
    """Gathers items while a call is under way, and sends them together with the next one."""

    def __init__(self, send: Callable[[list[A]], Awaitable[Sequence[R]]]) -> None:
        self._send = send
        self._items: list[tuple[A, asyncio.Future[R]]] = []
        self._more = asyncio.Event()

    async def put(self, item: A) -> R:
        """The answer to `item`, or what its call raised."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._items.append((item, answer))
        self._more.set()
        return await answer

    async def run(self) -> None:
        """Sends for ever. An error of the caller's making goes to who put the item; any other ends this."""
        while True:
            await self._more.wait()
            await asyncio.sleep(0)  # let all who are ready now put theirs too
            batch, self._items = self._items, []
            self._more.clear()
            try:
                answers = await self._send([item for item, _ in batch])
            except (InvalidRequest, AlreadyExists) as error:
                if len(batch) == 1:
                    _settle(batch[0][1], error)
                else:
                    await self._one_by_one(batch)
            else:
                for (_, answer), value in zip(batch, answers, strict=True):
                    _settle(answer, value)

    async def _one_by_one(self, batch: list[tuple[A, "asyncio.Future[R]"]]) -> None:
        """One item spoiled the call: find out which. What was taken already is known by its id."""
        for item, answer in batch:
            try:
                _settle(answer, (await self._send([item]))[0])
            except (InvalidRequest, AlreadyExists) as error:
                _settle(answer, error)


class CoordinatorTraffic:
    """Rollouts and episodes of one run, under one lease."""

    def __init__(self, lease: Lease, urgent: Callable[[RolloutRequest], bool]) -> None:
        """`urgent` tells what training waits for now; the rest, submitted ahead, goes apart and cannot hold it up."""
        self._lease = lease
        self._urgent = urgent
        self._submits: dict[bool, CallBatches[RolloutRequest, SubmitOutcome]] = {
            lane: CallBatches(partial(self._submit, lane)) for lane in (True, False)
        }
        self._episodes: CallBatches[Episode, None] = CallBatches(self._complete)
        self._waiting: dict[str, asyncio.Future[FinishedRollout]] = {}
        self._in_flight = 0
        self.orphans: dict[str, FinishedRollout] = {}

    async def generate(self, request: RolloutRequest) -> FinishedRollout:
        """Submit `request` and wait for its end, however long that takes.

        Raises `AlreadyCompleted`, `InvalidRequest` (the coordinator refuses it), or `AlreadyExists` (other body).
        """
        finish: asyncio.Future[FinishedRollout] = asyncio.get_running_loop().create_future()
        if (early := self.orphans.pop(request.rollout_id, None)) is not None:
            finish.set_result(early)
        self._waiting[request.rollout_id] = finish
        try:
            if await self._submits[self._urgent(request)].put(request) is SubmitOutcome.COMPLETED:
                raise AlreadyCompleted(request.rollout_id)
            self._in_flight += 1
            try:
                return await finish
            finally:
                self._in_flight -= 1
        finally:
            del self._waiting[request.rollout_id]

    async def complete(self, episodes: Sequence[Episode]) -> None:
        """Ends `episodes`, in as few calls as fit; returns once all of them are stored."""
        await asyncio.gather(*(self._episodes.put(episode) for episode in episodes))

    async def run(self) -> None:
        """Carries the traffic until cancelled, or until the lease is lost."""
        async with asyncio.TaskGroup() as tasks:
            for lane in self._submits.values():
                tasks.create_task(lane.run())
            tasks.create_task(self._episodes.run())
            tasks.create_task(self._route())

    async def _route(self) -> None:
        async for finished in self._lease.finished():
            waiter = self._waiting.get(finished.rollout_id)
            if waiter is None:
                self.orphans[finished.rollout_id] = finished
            elif not waiter.done():
                waiter.set_result(finished)

    async def _submit(self, urgent: bool, requests: list[RolloutRequest]) -> list[SubmitOutcome]:
        """Waits while the run's quota or the queue is full, unless nothing can be left that would make room."""
        give_up = time.monotonic() + _FULL_S
        while True:
            try:
                return await self._lease.submit_rollouts(requests, wait=False)
            except NoCapacity as error:
                now = time.monotonic()
                if self._in_flight or not urgent:
                    give_up = now + _FULL_S
                if now > give_up:
                    raise RunFailed(f"quota_bytes must hold max_staleness + 1 steps; raise it ({error})") from error
                await asyncio.sleep(error.retry_after_s)

    async def _complete(self, episodes: list[Episode]) -> list[None]:
        await self._lease.complete_episodes(episodes)
        return [None] * len(episodes)


def _settle(answer: "asyncio.Future[R]", value: R | Exception) -> None:
    if answer.done():  # its waiter was cancelled
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
