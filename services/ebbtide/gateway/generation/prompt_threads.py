"""Encodes prompts in threads of their own, and gives the keys turns in them.

A template may take its whole processor time for each prompt. In the threads that everything shares, one key's prompts
would hold up every other work; in one queue, they would hold up the prompts of all other keys.

Invariant: as many prompts are encoded at once as there are threads. The key whose last turn is longest ago is next;
prompts of a key go in order of arrival. The limits on requests bound how many wait.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class PromptThreads:
    """Belongs to one event loop, but for its threads. `threads`: how many."""

    def __init__(self, threads: int = 4) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the keys' next turns

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Return or raise what `work` does. A caller that leaves while it runs leaves it its thread until it ends."""
        await self._turn(owner)
        loop = asyncio.get_running_loop()

        def ended(_work: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._end)

        doing = self._executor.submit(work)
        doing.add_done_callback(ended)
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        """Take no more work. What runs goes on to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just got its turn
                self._end()
            raise

    def _end(self) -> None:
        """Hand a thread on, or have it free."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the other keys
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
