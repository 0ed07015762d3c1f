"""Bounds how many calls of one user are worked on at once, so that a flood of one user's delays others little.

A user is a name in the callers' tokens. Callers without a name share the cluster's secret and are not bounded. A call
beyond the bound waits for its turn; those of a user go in order of arrival, and a cancelled one simply leaves. Streams
take a turn only for each piece of work: most of their time they wait.

Invariant: a user is known here only while a call of theirs works or waits.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Final
from weakref import WeakValueDictionary


class CallerTurns:
    """`at_once`: calls of one user; 0: any number."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._users = WeakValueDictionary[str, asyncio.Semaphore]()

    def of(self, name: str) -> AbstractAsyncContextManager[None]:
        """A turn of a user."""
        if not name or not self._at_once:
            return nullcontext()
        return self._turn(name)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        turns = self._users.setdefault(name, asyncio.Semaphore(self._at_once))
        async with turns:
            yield

    def begin_stream(self, name: str) -> None:
        """Have `stream_turn` give this user's turns in the present task and in those it starts."""
        _STREAM.set((self, name))


#: The turns for the pieces of work of the present task's stream, and its user.
_STREAM: Final[ContextVar[tuple[CallerTurns, str] | None]] = ContextVar("stream_turns", default=None)


def stream_turn() -> AbstractAsyncContextManager[None]:
    """The turn for a piece of work of the present stream, such as reading a page. Hold it for no more than that."""
    found = _STREAM.get()
    return nullcontext() if found is None else found[0].of(found[1])
