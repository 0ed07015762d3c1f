"""Gathers the driver's requests into few calls to the coordinator, and routes finished rollouts to their waiters.

Invariant: a rollout id has at most one waiter, registered before its submit is sent, so that it misses no finish.
`orphans` keeps finishes without a waiter: after a restart they precede their submits. A restarted process rebuilds all
of this: the coordinator keeps submitted rollouts, and sends each finish until its episode is completed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from ebbtide.client import Lease
from ebbtide.errors import AlreadyExists, EbbtideError, InvalidRequest, NoCapacity
from ebbtide.run_client import RunFailed
from ebbtide.types.rollout import Episode, FinishedRollout, RolloutRequest, SubmitOutcome

A = TypeVar("A")
R = TypeVar("R")

#: If there is no room for so long while nothing is in flight and training waits, no commit will make room.
_FULL_S: Final = 300.0


class AlreadyCompleted(EbbtideError):
    """A former driver has completed the rollout's episode."""


class _Asked(NamedTuple):
    request: RolloutRequest
    step: int | None


class CallBatches(Generic[A, R]):
    """Gathers items while a call is under way, and sends them together with the next one."""

    def __init__(self, send: Callable[[list[A]], Awaitable[Sequence[R]]]) -> None:
        self._send = send
        self._items: list[tuple[A, asyncio.Future[R]]] = []
        self._more = asyncio.Event()

    async def put(self, item: A) -> R:
        """Returns the answer to `item`, or raises its call's error."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._items.append((item, answer))
        self._more.set()
        return await answer

    async def run(self) -> None:
        """Sends until cancelled. Faults of an item go to its caller; any other error ends this."""
        while True:
            await self._more.wait()
            await asyncio.sleep(0)  # let all ready callers put their items too
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
        """Repeats a call item by item to find the faulty one. The coordinator knows accepted items by their ids."""
        for item, answer in batch:
            try:
                _settle(answer, (await self._send([item]))[0])
            except (InvalidRequest, AlreadyExists) as error:
                _settle(answer, error)


class CoordinatorTraffic:
    """Rollouts and episodes of one run, under one lease."""

    def __init__(self, lease: Lease, urgent: Callable[[RolloutRequest], bool]) -> None:
        """`urgent` selects requests that training waits for now; the others go in calls of their own."""
        self._lease = lease
        self._urgent = urgent
        self._submits: dict[bool, CallBatches[_Asked, SubmitOutcome]] = {
            lane: CallBatches(partial(self._submit, lane)) for lane in (True, False)
        }
        self._episodes: CallBatches[Episode, None] = CallBatches(self._complete)
        self._waiting: dict[str, asyncio.Future[FinishedRollout]] = {}
        self._in_flight = 0
        #: No more rollouts of lower steps are submitted, by this driver or a later one.
        self.first_step = 0
        self.orphans: dict[str, FinishedRollout] = {}

    async def generate(self, request: RolloutRequest, *, step: int | None = None) -> FinishedRollout:
        """Submits `request` and waits for its end, without a time limit. `step`: that it trains.

        Raises `AlreadyCompleted`, `InvalidRequest` (refused), or `AlreadyExists` (submitted with another body).
        """
        finish: asyncio.Future[FinishedRollout] = asyncio.get_running_loop().create_future()
        if (early := self.orphans.pop(request.rollout_id, None)) is not None:
            finish.set_result(early)
        self._waiting[request.rollout_id] = finish
        try:
            if await self._submits[self._urgent(request)].put(_Asked(request, step)) is SubmitOutcome.COMPLETED:
                raise AlreadyCompleted(request.rollout_id)
            self._in_flight += 1
            try:
                return await finish
            finally:
                self._in_flight -= 1
        finally:
            del self._waiting[request.rollout_id]

    async def complete(self, episodes: Sequence[Episode]) -> None:
        """Ends `episodes` in few calls. Returns once all of them are stored."""
        await asyncio.gather(*(self._episodes.put(episode) for episode in episodes))

    async def run(self) -> None:
        """Carries the traffic until cancelled, or the lease is lost."""
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

    async def _submit(self, urgent: bool, asked: list[_Asked]) -> list[SubmitOutcome]:
        """Submits each step's rollouts in a call of their own."""
        outcomes: dict[str, SubmitOutcome] = {}
        for step in dict.fromkeys(one.step for one in asked):
            requests = [one.request for one in asked if one.step == step]
            found = await self._submit_step(urgent, requests, step)
            outcomes |= zip((one.rollout_id for one in requests), found, strict=True)
        return [outcomes[one.request.rollout_id] for one in asked]

    async def _submit_step(self, urgent: bool, requests: list[RolloutRequest], step: int | None) -> list[SubmitOutcome]:
        """Waits while the run's quota or the queue is full, unless nothing more can make room."""
        give_up = time.monotonic() + _FULL_S
        while True:
            try:
                first_step = self.first_step
                return await self._lease.submit_rollouts(requests, wait=False, step=step, first_step=first_step)
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
