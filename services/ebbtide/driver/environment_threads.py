"""Environment code in threads of its own: what it raises or never returns from ends one call, not the driver.

Invariant: at most `threads` calls run whose callers still wait, and `_serving` threads wait for calls or run such ones.
A call that outlives its time is abandoned: its thread cannot be killed, so it is a daemon, counted in `stuck` until it
returns and then ends, and another takes its place. All of it dies with the process; the driver's replay makes it anew.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ebbtide.claimed_runs.run_failure import RunFailed

T = TypeVar("T")

#: More calls stuck for good than this mean that the environment as a whole hangs, not one episode of it.
MAX_STUCK: Final = 256


class EnvironmentHangs(RunFailed):
    """So many calls into the environment never returned that the run cannot go on."""


class TookTooLong(Exception):
    """A call did not return in its time."""


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.abandoned = False

    def run(self) -> None:
        try:
            value = self.function()
        except BaseException as error:  # noqa: BLE001 - it is the caller's, who waits on the other side of the future
            # SystemExit and their like would end the driver where it awaits; StopIteration cannot cross a future.
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.future.set_exception(error if fit else RuntimeError(f"environment code raised {error!r}"))
        else:
            self.future.set_result(value)


class EnvironmentThreads:
    """Runs calls in at most `threads` threads at a time, each for a limited time."""

    def __init__(self, threads: int) -> None:
        self._limit = threads
        self._places = asyncio.Semaphore(threads)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._serving = 0
        self.stuck = 0

    async def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """What `function` returns or raises; `TookTooLong` once it has run for `timeout_s` seconds.

        Raises `EnvironmentHangs` when too many calls are stuck.
        """
        async with self._places:
            if self.stuck >= MAX_STUCK:
                raise EnvironmentHangs(f"{self.stuck} calls into the environment never returned: mend it")
            if self._serving < self._limit:
                threading.Thread(target=_serve, args=(self._calls,), name="environment", daemon=True).start()
                self._serving += 1
            call = _Call(function)
            result: asyncio.Future[T] = asyncio.wrap_future(call.future)
            self._calls.put(call)
            try:
                await asyncio.wait({result}, timeout=max(timeout_s, 0.0))
                if result.done():
                    return result.result()
                raise TookTooLong
            finally:
                if not result.done():
                    self._abandon(call, result)

    def close(self) -> None:
        """End the threads that wait for calls."""
        for _ in range(self._serving):
            self._calls.put(None)
        self._serving = 0

    def _abandon(self, call: _Call, result: "asyncio.Future[Any]") -> None:
        call.abandoned = True
        self._serving -= 1
        self.stuck += 1
        result.add_done_callback(self._returned)

    def _returned(self, result: "asyncio.Future[Any]") -> None:
        self.stuck -= 1
        if not result.cancelled():
            result.exception()  # nobody waits for it any more, so nobody else will look at it


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
        if call.abandoned:
            return
