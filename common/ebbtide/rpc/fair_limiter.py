"""Bounds how many calls of one user are worked on at once, so that a flood of one user's delays others little.

A user is a name in the callers' tokens. Callers without a name share the cluster's secret and are not bounded. A call
beyond the bound waits for its turn; those of a user go in order of arrival, and a cancelled one simply leaves. Streams
take a turn only for each piece of work: most of their time they wait. Nor does a call that waits for the store's disk
keep its turn (`end_turn`): what it does after that is short.

Invariant: a user is known here only while a call of theirs works or waits.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Final

#: Methods whose calls take no turn: a lease must be renewed in time, whatever else its user does. Each call is a small
#: write.
WITHOUT_TURN: Final = frozenset({"/ebbtide.v1.Runs/RenewLease", "/ebbtide.v1.Runs/ReleaseLease"})


class _User:
    def __init__(self, name: str) -> None:
        self.name, self.working = name, 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    def has_waiting(self) -> bool:
        while self.waiting and self.waiting[0].done():  # cancelled
            self.waiting.popleft()
        return bool(self.waiting)


class _Turn:
    """A turn that a call has got. It ends once."""

    def __init__(self, turns: "FairLimiter", user: _User) -> None:
        self._turns, self._user = turns, user
        self._over = False

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._turns.end(self._user)


class FairLimiter:
    """`at_once`: calls of one user; 0: any number."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once
        self._users: dict[str, _User] = {}

    @property
    def users(self) -> Collection[str]:
        """Those whose calls work or wait."""
        return self._users.keys()

    def of(self, name: str) -> AbstractAsyncContextManager[None]:
        """A turn of a user."""
        if not name or not self._at_once:
            return nullcontext()
        return self._turn(name)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        user = self._users.setdefault(name, _User(name))
        if user.has_waiting() or user.working >= self._at_once:
            await self._wait(user)
        else:
            user.working += 1
        turn = _Turn(self, user)
        _TURN.set(turn)
        try:
            yield
        finally:
            turn.end()

    async def _wait(self, user: _User) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        user.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just got its turn
                self.end(user)
            else:
                self._forget_idle(user)
            raise

    def end(self, user: _User) -> None:
        """End a turn of the user: the next of their calls has it."""
        user.working -= 1
        while user.has_waiting() and user.working < self._at_once:
            user.working += 1
            user.waiting.popleft().set_result(None)
        self._forget_idle(user)

    def _forget_idle(self, user: _User) -> None:
        if not user.working and not user.has_waiting() and self._users.get(user.name) is user:
            del self._users[user.name]

    def begin_stream(self, name: str) -> None:
        """Have `stream_turn` give this user's turns in the present task and in those it starts."""
        _STREAM.set((self, name))


#: The turns for the pieces of work of the present task's stream, and its user.
_STREAM: Final[ContextVar[tuple[FairLimiter, str] | None]] = ContextVar("stream_turns", default=None)
#: The turn of the present task's call.
_TURN: Final[ContextVar[_Turn | None]] = ContextVar("turn", default=None)


def end_turn() -> None:
    """End the turn of the present call, if it has one: from now on it only waits, or does what is short."""
    if (turn := _TURN.get()) is not None:
        turn.end()


def stream_turn() -> AbstractAsyncContextManager[None]:
    """The turn for a piece of work of the present stream, such as reading a page. Hold it for no more than that."""
    found = _STREAM.get()
    return nullcontext() if found is None else found[0].of(found[1])
