"""Hands stored tokens to the readers of their rollouts straight from the append, so that these need not be read from
the store again.

Invariant: a reader is given only what the store has acknowledged, as it was stored. Each of its chunks begins where the
one before ended: what was pushed is compared with the reader's offset, and wherever it does not continue that, the
reader reads the store. What waits for one reader is bounded. Nothing is lost with the process: readers come again with
the number of tokens that they have.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ebbtide.append_stream import AppendAck, AppendColumns
from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.notifier import Notifier, notified_or_late
from ebbtide.types.rollout import FinishReason, TokenChunk
from ebbtide.types.tokens import TOKEN_BYTES, token_count

#: Tokens that wait for one reader, 48 KiB. A reader that is further behind reads the store.
WAITING_TOKENS: Final = 4096
_PUSHED, _READ = (metrics.token_chunks.labels(kind) for kind in ("pushed", "read"))


class TokenReader:
    """One reader of one rollout, and the tokens pushed to it that it has not taken: those in [`_begin`, `_end`)."""

    def __init__(self) -> None:
        self._tokens = bytearray()
        self._begin = self._end = 0
        self._finish: FinishReason | None = None  # at `_end`
        self._joined = False  # something was pushed, and nothing after it was missed
        self._look = True  # only the store knows what there is
        self._news = asyncio.Event()

    def set(self) -> None:
        """Note that something happened to the rollout that the store knows."""
        self._look = True
        self._news.set()

    def push(self, offset: int, tokens: bytes, finish: FinishReason | None) -> None:
        """Take over what an append stored: tokens from `offset` on, and the finish after them."""
        if not self._joined or offset != self._end:  # a store that forgot something was sent it again
            self._tokens.clear()
            self._begin = offset
        self._tokens += tokens
        self._end, self._finish, self._joined = offset + token_count(tokens), finish, True
        if self._end - self._begin > WAITING_TOKENS:
            self._tokens.clear()
            self._joined, self._look = False, True
        self._news.set()

    async def follow(self, offset: int, read: Callable[[int], Awaitable[TokenChunk]]) -> AsyncIterator[TokenChunk]:
        """The tokens from `offset` on; the last chunk has the finish reason. `read`: asks the store for those from an
        offset on.
        """
        while True:
            chunk, came = self._take(offset), _PUSHED
            if chunk is None:
                chunk, came = await self._read(offset, read), _READ
            if chunk.tokens or chunk.reason:
                came.inc()
                yield chunk
                if chunk.reason:
                    return
                offset += token_count(chunk.tokens)
            elif not self._look:
                if not await notified_or_late(self._news):
                    self._look = True
                self._news.clear()

    def _take(self, offset: int) -> TokenChunk | None:
        """What was pushed from `offset` on; None if the store must be asked."""
        if self._look or (self._joined and not self._continues(offset)):
            return None
        if not self._joined or offset > self._end:
            return TokenChunk(offset=offset, tokens=b"")
        tokens = bytes(memoryview(self._tokens)[(offset - self._begin) * TOKEN_BYTES :])
        self._tokens.clear()
        self._begin = self._end
        return TokenChunk(offset=offset, tokens=tokens, reason=self._finish)

    def _continues(self, offset: int) -> bool:
        """Whether the reader lacks nothing before what was pushed. A reader of tokens that the store forgot waits."""
        return self._begin <= offset and not (offset > self._end and self._finish)

    async def _read(self, offset: int, read: Callable[[int], Awaitable[TokenChunk]]) -> TokenChunk:
        self._look = False
        chunk = await read(offset)
        reached = offset + token_count(chunk.tokens)
        # Unless later tokens are pushed, only an empty answer says that there are no more.
        self._look |= bool(chunk.tokens) and not (self._joined and self._begin <= reached)
        return chunk


class TokenReaders:
    """All readers, by run and rollout."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._readers: dict[str, dict[str, dict[TokenReader, None]]] = {}  # in order, so that simulations repeat

    @contextmanager
    def reading(self, run_id: str, rollout_id: str) -> Iterator[TokenReader]:
        """A reader, to which tokens are pushed from now on."""
        reader = TokenReader()
        rollouts = self._readers.setdefault(run_id, {})
        rollouts.setdefault(rollout_id, {})[reader] = None
        metrics.token_readers.inc()
        try:
            with self._notifier.told(reader, "tokens", run_id, rollout_id):
                yield reader
        finally:
            metrics.token_readers.dec()
            del rollouts[rollout_id][reader]
            if not rollouts[rollout_id]:
                del rollouts[rollout_id]
            if not rollouts:
                del self._readers[run_id]

    def push(self, deltas: AppendColumns, others: Mapping[int, AppendAck]) -> None:
        """Hand out the deltas of a call that the store has acknowledged. `others`: those, by place, that were not
        stored as they were sent; their readers ask the store.
        """
        if not (rollouts := self._readers.get(deltas.run_id)):
            return
        at = 0
        for place, (rollout_id, end, count) in enumerate(zip(deltas.rollouts, deltas.ends, deltas.counts, strict=True)):
            begin, at = at, at + count * TOKEN_BYTES
            for reader in rollouts.get(rollout_id, ()):
                if place in others:
                    reader.set()
                else:
                    reader.push(end - count, deltas.tokens[begin:at], deltas.finishes.get(place))
