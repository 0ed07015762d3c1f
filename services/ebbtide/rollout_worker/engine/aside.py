"""A thread that lasts as long as the process: what is started from it is not tied to the life of a shorter one."""

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """Does one thing after another, in one thread that never ends and holds up nobody's end."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="engine starts", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._work.get()()

    async def do(self, work: Callable[[], T]) -> T:
        """The result of `work`. Who stops waiting does not stop it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                loop.call_soon_threadsafe(_tell, future, None, error)
            else:
                loop.call_soon_threadsafe(_tell, future, result, None)

        self._work.put(run)
        done: T = await future
        return done


def _tell(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@cache
def lasting() -> Aside:
    """The process's own."""
    return Aside()
