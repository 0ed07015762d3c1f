"""Runs environment code in threads of its own: an exception or an endless call ends one call, not the driver.

Invariant: at most `threads` calls run whose callers still wait; `_serving` threads wait for calls or run such ones. A
call that exceeds its time is abandoned: its daemon thread cannot be killed, counts as `stuck` until it returns, and is
replaced. All of it dies with the process; the driver's replay makes it again.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ebbtide.claimed_runs.run_failure import RunFailed

T = TypeVar("T")

#: More stuck calls than this mean that the whole environment hangs, not single episodes.
MAX_STUCK: Final = 256


class EnvironmentHangs(RunFailed):
    """Too many calls into the environment never returned, so the run cannot go on."""


class TookTooLong(Exception):
    """A call exceeded its time."""


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.abandoned = False

    def run(self) -> None:
        try:
            value = self.function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
            # SystemExit and the like would end the awaiting driver; StopIteration cannot cross a future.
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
        """Returns or raises what `function` does. Raises `TookTooLong` after `timeout_s` seconds, and
        `EnvironmentHangs` if too many calls are stuck."""
        async with self._places:
            if self.stuck >= MAX_STUCK:
                raise EnvironmentHangs(f"{self.stuck} calls into the environment never returned: repair it")
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
        """Ends the threads that wait for calls."""
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
            result.exception()  # marks it as retrieved: its caller has left


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
        if call.abandoned:
            return
