"""Runs the decoding, applying and composing of tile patches in threads, a bounded number of tiles at once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

from ebbtide.weights.patch.tile_codec import TileCodec, warm_up

T = TypeVar("T")
R = TypeVar("R")
#: Tiles in flight for each thread: enough that none waits for the event loop.
_AHEAD: Final = 4


class TileCodecs:
    """Each thread has its own codecs, and each codec its own scratch (about 10 MiB)."""

    def __init__(self, threads: int) -> None:
        self._own = threading.local()
        self._window = threads * _AHEAD
        self._warm = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="codec")

    def of(self, width: int) -> TileCodec:
        """This thread's codec for units of `width` bytes."""
        found: dict[int, TileCodec] = self._own.__dict__.setdefault("codecs", {})
        if width not in found:
            found[width] = TileCodec(width)
        return found[width]

    def warm(self) -> None:
        """Compile the kernels once in the background, so that the first patch does not wait for them."""
        if not self._warm:
            self._warm = True
            self._pool.submit(warm_up)

    async def map(self, work: Callable[[T], R], items: Iterable[T]) -> AsyncIterator[list[R]]:
        """Do `work` on all items, in order. At most one window of results is held at a time."""
        loop = asyncio.get_running_loop()
        source = iter(items)
        while window := list(islice(source, self._window)):
            futures = [loop.run_in_executor(self._pool, work, item) for item in window]
            try:
                yield list(await asyncio.gather(*futures))
            finally:
                await asyncio.gather(*futures, return_exceptions=True)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
