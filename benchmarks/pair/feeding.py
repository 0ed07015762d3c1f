"""The run's side: rollouts that are always there to be generated, and the books over them.

Invariant: `open` holds each rollout that was submitted and has not finished; a finish that comes twice is counted as
such. What finished is acknowledged as dropped, so that the store stays small however long this goes on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final

from ebbtide.client import Lease
from ebbtide.errors import EbbtideError
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids

#: Tokens of prompts and responses. Responses are drawn between the two, evenly in their logarithm: long-tailed.
PROMPT: Final = 64
SHORTEST, LONGEST = 512, 1920
_BATCH: Final = 8
_DROPPED: Final = "benchmark"


class Feeding:
    """Made by `feeding`. `tokens` counts those of finished rollouts; those of open ones are in the worker's ledger."""

    def __init__(self, lease: Lease, waiting: int, seed: int) -> None:
        self._lease, self._waiting, self._random = lease, waiting, Random(seed)
        self._next = 0
        self._room = asyncio.Event()
        self.open: dict[str, int] = {}  # rollout -> tokens that it is to make
        self.finished: dict[str, int] = {}  # rollout -> tokens that it made
        self.aborted: set[str] = set()
        self.twice = self.short = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.submit()), asyncio.create_task(self.collect())]

    def check(self) -> None:
        """Raises what either task failed with."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def stop(self) -> None:
        """Submit nothing more."""
        self._tasks[0].cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self) -> None:
        """Keep as many open as wanted, for ever."""
        while True:
            self._room.clear()
            while len(self.open) < self._waiting:
                await self._lease.submit_rollouts([self._request() for _ in range(_BATCH)])
            await self._room.wait()

    async def collect(self) -> None:
        """Take in finished ones, for ever."""
        cursors: set[str] = set()
        async for one in self._lease.finished():
            if one.cursor in cursors:
                continue
            cursors.add(one.cursor)
            wanted, tokens = self.open.pop(one.rollout_id, None), len(one.tokens) // TOKEN_BYTES
            if wanted is None:
                self.twice += one.rollout_id not in self.aborted
                continue
            self.short += tokens != wanted
            self.finished[one.rollout_id] = tokens
            with suppress(EbbtideError):
                await self._lease.acknowledge([one.rollout_id], drop_reason=_DROPPED)
            self._room.set()

    async def give_up(self, rollout_ids: list[str]) -> None:
        """Abort these whole; others are asked for in their place."""
        gone = [rollout_id for rollout_id in rollout_ids if self.open.pop(rollout_id, None) is not None]
        self.aborted.update(gone)
        await self._lease.cancel_rollouts(gone, _DROPPED)
        self._room.set()

    def _request(self) -> RolloutRequest:
        self._next += 1
        name = f"r{self._next}"
        length = round(SHORTEST * (LONGEST / SHORTEST) ** self._random.random())
        self.open[name] = length
        return RolloutRequest(
            rollout_id=name,
            group_id=f"g{name}",
            episode_id=f"e{name}",
            prompt_ids=pack_ids([self._random.randrange(3, 120) for _ in range(PROMPT)]),
            sampling=Sampling(temperature=1.0, max_tokens=length, ignore_eos=True),
        )


@asynccontextmanager
async def feeding(lease: Lease, waiting: int, seed: int) -> AsyncIterator[Feeding]:
    """Rollouts come until the block is left."""
    feed = Feeding(lease, waiting, seed)
    feed.start()
    try:
        yield feed
    finally:
        await feed.close()
