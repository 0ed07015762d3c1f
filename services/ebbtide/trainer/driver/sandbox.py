"""Environment code in threads of its own: what it raises or never returns from ends one call, not the driver.

Invariant: at most `threads` calls run whose callers still wait. A call that outlives its time is abandoned: its thread
cannot be killed, so it is a daemon, counted until it returns, and its place is given on at once.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ebbtide.trainer.race import RunFailed

T = TypeVar("T")

#: More calls stuck for good than this mean that the environment as a whole hangs, not one episode of it.
MAX_STUCK: Final = 256


class EnvironmentHangs(RunFailed):
    """So many calls into the environment never returned that the run cannot go on."""


class TookTooLong(Exception):
    """A call did not return in its time."""


class Sandbox:
    """Runs calls in at most `threads` threads at a time, each for a limited time."""

    def __init__(self, threads: int) -> None:
        self._places = asyncio.Semaphore(threads)
        self.stuck = 0

    async def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """What `function` returns or raises; `TookTooLong` once it has run for `timeout_s` seconds.

        Raises `EnvironmentHangs` when too many calls are stuck.
        """
        async with self._places:
            if self.stuck >= MAX_STUCK:
                raise EnvironmentHangs(f"{self.stuck} calls into the environment never returned: mend it")
            future: concurrent.futures.Future[T] = concurrent.futures.Future()
            result = asyncio.wrap_future(future)
            threading.Thread(target=_run, args=(function, future), name="environment", daemon=True).start()
            try:
                await asyncio.wait({result}, timeout=max(timeout_s, 0.0))
                if result.done():
                    return result.result()
                raise TookTooLong
            finally:
                if not result.done():
                    self.stuck += 1
                    result.add_done_callback(self._returned)

    def _returned(self, result: "asyncio.Future[Any]") -> None:
        self.stuck -= 1
        if not result.cancelled():
            result.exception()  # nobody waits for it any more, so nobody else will look at it


def _run(function: Callable[[], T], future: "concurrent.futures.Future[T]") -> None:
    try:
        value = function()
    except BaseException as error:  # noqa: BLE001 - it is the caller's, who waits on the other side of the future
        # SystemExit and their like would end the driver where it awaits; StopIteration cannot cross a future.
        fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if fit else RuntimeError(f"environment code raised {error!r}"))
    else:
        future.set_result(value)
