"""Keeps verified blobs for peers, and hands them to peers that wait.

Invariant: only blobs that matched their digests come in. They have at most `most` bytes together; the least recently
used go first. A waiter gets its blob when it comes, or None at once when it is not on its way, and never waits longer
than its timeout. It serves one event loop; nothing outlives the process.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class BlobCache:
    def __init__(self, most: int) -> None:
        """`most`: bytes kept; with 0 it still hands blobs to waiters."""
        self._most, self.size = most, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._arriving: set[bytes] = set()
        self._planning = 0
        self._waiting: dict[bytes, list[asyncio.Future[bytes | None]]] = {}

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Take any blob for one on its way. At the end, waiters for others get None."""
        self._planning += 1
        try:
            yield
        finally:
            self._planning -= 1
            if not self._planning:
                for digest in self._waiting.keys() - self._arriving:
                    self._tell(digest, None)

    @contextmanager
    def arriving(self, digests: Iterable[bytes]) -> Iterator[None]:
        """Take these blobs for ones on their way. At the end, waiters for those that have not come get None."""
        expected = set(digests)
        self._arriving |= expected
        try:
            yield
        finally:
            for digest in expected & self._arriving:
                self._tell(digest, None)
            self._arriving -= expected

    def put(self, digest: bytes, data: bytes, *, keep: bool = True) -> None:
        """Take a verified blob. `keep` False: a mirror has it, so it goes to waiters alone."""
        self._arriving.discard(digest)
        self._tell(digest, data)
        if not keep or len(data) > self._most or digest in self._kept:
            return
        self._kept[digest] = data
        self.size += len(data)
        while self.size > self._most:
            self.size -= len(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all blobs."""
        self._kept.clear()
        self.size = 0

    def get(self, digest: bytes) -> bytes | None:
        if (data := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return data

    async def wait(self, digest: bytes, timeout_s: float) -> bytes | None:
        """The blob, at once if it is kept, else when it comes; None if it does not come within `timeout_s`. The mirror
        may have it by then."""
        if (data := self.get(digest)) is not None or not (self._planning or digest in self._arriving):
            return data
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(digest, [])
        waiting.append(future)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None
        finally:
            if future in waiting:
                waiting.remove(future)
            if not waiting and self._waiting.get(digest) is waiting:
                del self._waiting[digest]

    def _tell(self, digest: bytes, data: bytes | None) -> None:
        for future in self._waiting.pop(digest, ()):
            if not future.done():
                future.set_result(data)
