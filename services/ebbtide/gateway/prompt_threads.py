"""Encodes prompts in threads of their own, and gives the keys turns in them.

A template may take its whole processor time for each prompt. In the threads that everything shares, one key's prompts
would hold up every other work; in one queue, they would hold up the prompts of all other keys.

Invariant: as many prompts are encoded at once as there are threads. The key whose last turn is longest ago is next;
prompts of a key go in order of arrival. A bounded number of prompts waits. Beyond it the last one of the key that has
most of them is refused, so a key with few is served. Work on what was generated already has its turns among
the prompts and is never refused: requests under way bound it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from ebbtide.errors import Unavailable

#: Prompts that wait for a thread. A long chat takes some milliseconds, and at most a second of processor time.
MOST_WAITING: Final = 512
T = TypeVar("T")


class PromptThreads:
    """Belongs to one event loop, but for its threads. `threads`: how many. `most_waiting`: prompts in the queue."""

    def __init__(self, threads: int = 4, *, most_waiting: int = MOST_WAITING) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self._free, self._most_waiting = threads, most_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the keys' next turns
        self._prompts = set[asyncio.Future[None]]()  # of those that wait: the ones that may be refused

    async def run(self, owner: str, work: Callable[[], T], *, refusable: bool = True) -> T:
        """Return or raise what `work` does. A caller that leaves while it runs leaves it its thread until it ends.

        Raises `Unavailable` if too many prompts wait, unless the work is not `refusable`.
        """
        await self._turn(owner, refusable)
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

    async def _turn(self, owner: str, refusable: bool) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        if refusable:
            self._prompts.add(turn)
            self._refuse_excess(owner)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.done() or turn.cancelled():
                self._leave(owner, turn)
            elif turn.exception() is None:  # it had just got its turn
                self._end()
            raise
        finally:
            self._prompts.discard(turn)

    def _refuse_excess(self, newest: str) -> None:
        """Refuse the last prompt of the key that has most, if too many wait. Of equal keys it is the `newest`."""
        prompts = {one: [turn for turn in turns if turn in self._prompts] for one, turns in self._waiting.items()}
        if sum(map(len, prompts.values())) <= self._most_waiting:
            return
        owner = max(prompts, key=lambda one: (len(prompts[one]), one == newest))
        turn = prompts[owner][-1]
        self._leave(owner, turn)
        turn.set_exception(Unavailable(f"{self._most_waiting} prompts wait to be encoded, as many as may; try again"))

    def _leave(self, owner: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(owner)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

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
