"""Carries out the writes of clients' calls, also when the client leaves in the middle.

A call that is cancelled may have reached the store. If its write were cut off there, the mirror would miss it, and the
whole run would have to be read again. So a write that has begun goes on to its end, and the mirror follows.

Invariant: a write begins when it has its lock, which one write has at a time. A client that leaves while it waits for
the lock leaves nothing behind. So there are no more writes without a client than there are locks. Writes that are under
way when the process dies may or may not be done.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ebbtide import telemetry

log = telemetry.get_logger(__name__)
T = TypeVar("T")


class ClientWrites:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()  # each as long as somebody uses it

    @property
    def under_way(self) -> int:
        """Writes that have not ended; most of them wait for their lock."""
        return len(self._tasks)

    async def carry_out(self, lock: AbstractAsyncContextManager[None], write: Callable[[], Awaitable[T]]) -> T:
        """Enter `lock`, then do `write`. From then on it goes on to its end, even if the caller is cancelled."""
        begun = False

        async def whole() -> T:
            nonlocal begun
            async with lock:
                begun = True
                return await write()

        task = asyncio.create_task(whole(), name="client write")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not begun:
                task.cancel()
            raise
        finally:
            del task  # it holds the error, which refers to this frame: together they would be a cycle

    def lock(self, kind: str, name: str) -> asyncio.Lock:
        """The lock of writes that need none of the model: one at a time of each kind and name."""
        return self._locks.setdefault((kind, name), asyncio.Lock())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("write failed", reason=str(error))  # its caller has the error, unless it left

    async def settle(self, longest_s: float) -> None:
        """Wait for the writes that are under way, `longest_s` at most. Call when no client can begin another."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=longest_s)

    async def close(self) -> None:
        """Cut off what is still under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
