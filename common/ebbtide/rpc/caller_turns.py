"""Bounds how many calls of one user are worked on at once, so that a flood of one user's delays others little.

A user is a name in the callers' tokens. Callers without a name share the cluster's secret and are not bounded. A call
beyond the bound waits for its turn; those of a user go in order of arrival, and a cancelled one simply leaves. Streams
take a turn only for each piece of work: most of their time they wait.

Invariant: a user is known here only while a call of theirs works or waits.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Final


class _User:
    def __init__(self, name: str) -> None:
        self.name, self.working = name, 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    def has_waiting(self) -> bool:
        while self.waiting and self.waiting[0].done():  # cancelled
            self.waiting.popleft()
        return bool(self.waiting)


class CallerTurns:
    """`at_once`: calls of one user; 0: any number."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._users: dict[str, _User] = {}

    def of(self, name: str) -> AbstractAsyncContextManager[None]:
        """A turn of a user."""
        if not name or not self._at_once:
            return nullcontext()
        return self._turn(name)

    def working(self, name: str) -> int:
        """How many calls of a user are worked on."""
        user = self._users.get(name)
        return user.working if user else 0

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        user = self._users.setdefault(name, _User(name))
        if user.has_waiting() or user.working >= self._at_once:
            await self._wait(user)
        else:
            user.working += 1
        try:
            yield
        finally:
            self._end(user)

    async def _wait(self, user: _User) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        user.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just got its turn
                self._end(user)
            elif not user.working and not user.has_waiting():
                self._users.pop(user.name, None)
            raise

    def _end(self, user: _User) -> None:
        user.working -= 1
        while user.has_waiting() and user.working < self._at_once:
            user.working += 1
            user.waiting.popleft().set_result(None)
        if not user.working and not user.has_waiting():
            self._users.pop(user.name, None)

    def begin_stream(self, name: str) -> None:
        """Have `stream_turn` give this user's turns in the present task and in those it starts."""
        _STREAM.set((self, name))


#: The turns for the pieces of work of the present task's stream, and its user.
_STREAM: Final[ContextVar[tuple[CallerTurns, str] | None]] = ContextVar("stream_turns", default=None)


def stream_turn() -> AbstractAsyncContextManager[None]:
    """The turn for a piece of work of the present stream, such as reading a page. Hold it for no more than that."""
    found = _STREAM.get()
    return nullcontext() if found is None else found[0].of(found[1])
