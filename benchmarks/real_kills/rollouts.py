"""Distinct prompts, asked for in waves, and what came of each: its tokens as they were stored, and as it finished.

Invariant: `answers[n]` grows only at its end, by what `StreamTokens` says is stored; a rollout is known by its number,
and number `n` has prompt `n % prompts`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from ebbtide.client import Client, Lease
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids, unpack_tokens
from tests.support.waiting import wait_until

RUN: Final = "kills"


class Answer(Struct):
    """`stored`: packed tokens as a reader saw them acknowledged, each piece with its wall-clock time and its end."""

    stored: bytes = b""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    finishes: list[bytes] = field(default_factory=list)  # whole responses: one, unless it finished twice
    torn: bool = False  # a piece did not begin where the one before it ended

    @property
    def tokens(self) -> npt.NDArray[np.void]:
        """The response; empty before it has finished."""
        return unpack_tokens(self.finishes[0] if self.finishes else b"")


class Rollouts:
    """Made by `rollouts`."""

    def __init__(self, client: Client, lease: Lease, *, prompts: int, length: int, seed: int) -> None:
        self._client, self._lease, self._length = client, lease, length
        random = Random(seed)
        #: Distinct, for each begins with its own number in base 100.
        self._prompts = [
            [10 + number // 100, 10 + number % 100, *(random.randrange(2, 120) for _ in range(random.randrange(4, 24)))]
            for number in range(prompts)
        ]
        self.answers: list[Answer] = []
        self._readers: list[asyncio.Task[None]] = []
        self._collecting = asyncio.create_task(self._collect())

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    def open(self) -> int:
        return sum(not answer.finishes for answer in self.answers)

    async def one_of_each(self) -> None:
        """All prompts once, to their ends. Raises what a reader failed with."""
        await self._submit(self.prompts)
        await asyncio.gather(*self._readers)
        await wait_until(lambda: not self.open(), timeout=120, what="all finishes")

    async def close(self) -> None:
        tasks = [self._collecting, *self._readers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit(self, count: int) -> None:
        first = len(self.answers)
        self.answers += [Answer() for _ in range(count)]
        await self._lease.submit_rollouts(map(self._request, range(first, first + count)))
        for number in range(first, first + count):
            self._readers.append(asyncio.create_task(self._read(number)))

    def _request(self, number: int) -> RolloutRequest:
        return RolloutRequest(
            rollout_id=f"x{number}",
            group_id=f"g{number}",
            episode_id=f"e{number}",
            prompt_ids=pack_ids(self._prompts[number % self.prompts]),
            sampling=Sampling(temperature=0.0, max_tokens=self._length, ignore_eos=True),
        )

    async def _read(self, number: int) -> None:
        answer = self.answers[number]
        async for chunk in self._client.stream_tokens(RUN, f"x{number}"):
            answer.torn |= chunk.offset * TOKEN_BYTES != len(answer.stored)
            answer.stored += chunk.tokens
            answer.pieces.append((time.time(), len(answer.stored) // TOKEN_BYTES))

    async def _collect(self) -> None:
        """Take in finished rollouts, until cancelled. Again over a reconnect: by cursor."""
        cursors: set[str] = set()
        async for finish in self._lease.finished():
            if finish.cursor not in cursors:
                cursors.add(finish.cursor)
                self.answers[int(finish.rollout_id[1:])].finishes.append(finish.tokens)


@asynccontextmanager
async def rollouts(client: Client, lease: Lease, *, prompts: int, length: int, seed: int) -> AsyncIterator[Rollouts]:
    """Nothing is read any more when the block is left."""
    made = Rollouts(client, lease, prompts=prompts, length=length, seed=seed)
    try:
        yield made
    finally:
        await made.close()
