"""Runs digests and patches in threads, and leaves no work running after its caller.

Invariant: work that `run` starts has ended when the caller goes on, even if the caller is cancelled.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")
#: More threads only share the bandwidth of memory, and each has about 10 MiB of scratch.
_MOST: Final = 4


class DigestThreads:
    def __init__(self, most: int = _MOST, *, niceness: int = 0) -> None:
        """At most `most` threads, and no more than cores. `niceness`: of the threads and all that they start."""
        count = max(1, min(most, _MOST, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(count, "ebbtide-weights", _be_nice, (niceness,))

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. A cancelled call too ends only after `work`: then another may take the mirror."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # the first is raised below
                    await asyncio.wait([future])
            raise

    def begin(self, work: Callable[[], object]) -> None:
        """Start work without waiting for it."""
        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """Set the niceness of the calling thread, as Linux does."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
