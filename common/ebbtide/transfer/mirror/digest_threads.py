"""Threads for digests and patches, which leave nothing running behind their callers.

Invariant: who awaits `run` has what it started ended when it goes on, also when it goes on by being cancelled.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")
#: More share the bandwidth of memory, and each has about 10 MiB of scratch.
_MOST: Final = 4


class DigestThreads:
    def __init__(self, most: int = _MOST, *, niceness: int = 0) -> None:
        """At most `most`, and no more than there are cores. `niceness`: theirs, and that of all that they start."""
        count = max(1, min(most, _MOST, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(count, "ebbtide-weights", _be_nice, (niceness,))

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. Cancelled, this too ends only after `work`: a mirror may be another's then."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # the first is raised below
                    await asyncio.wait([future])
            raise

    def begin(self, work: Callable[[], object]) -> None:
        """Do something that nobody waits for."""
        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """On Linux this is the calling thread's own."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
