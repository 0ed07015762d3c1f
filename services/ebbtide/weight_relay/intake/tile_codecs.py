"""Decodes, applies and composes tile patches in threads, and rebuilds dense tiles by them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay.library.version_index import Ends
from ebbtide.weights import Place, Planner, TileTask, Way, tile_digest
from ebbtide.weights.patch import TileCodec, warm_up
from ebbtide.weights.tensors import unit_width

T = TypeVar("T")
R = TypeVar("R")
#: Tiles in flight for each thread: enough that none waits for the event loop.
_AHEAD: Final = 4
#: Reads a blob, verified. Raises `ChunkCorrupt` and `FileNotFoundError`.
Read: TypeAlias = Callable[[bytes], bytes]


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


def patched(dense: bytes, patches: Sequence[bytes], width: int, codecs: TileCodecs) -> bytes:
    """Apply tile patches to `dense`. Raises `InvalidRequest` for one that does not fit."""
    if not patches:
        return dense
    tile = np.frombuffer(bytearray(dense), np.dtype(f"<u{width}"))
    for patch in patches:
        codecs.of(width).apply(patch, tile)
    return tile.tobytes()


def rebuild(task: TileTask, width: int, codecs: TileCodecs, read: Read) -> bytes:
    """Make the dense tile of `task`, which starts at a dense one.

    Raises `InvalidRequest` for a patch that does not fit, and if another tile comes out.
    """
    data = patched(read(task.dense), [read(digest) for digest in task.patches], width, codecs)
    if tile_digest(data) != task.digest:
        raise InvalidRequest("makes another tile than its manifest says", field="patch")
    return data


def first_wrong(
    place: Place, start: Manifest, way: Sequence[tuple[Manifest, Patch]], codecs: TileCodecs, read: Read
) -> Ends | None:
    """Find the first patch on `way` (versions and the patches to them) that does not make its version's tile.

    Returns its base and version; None if all patches are right. Raises as `read`.
    """
    width = unit_width(start.tensors[place[0]].dtype)
    for length in range(1, len(way) + 1):
        target = way[length - 1][0]
        steps = Way(start=start, patches=tuple(patch for _, patch in way[:length]), keyframe=True)
        (task,) = Planner(target, [steps]).tasks([place], {})
        try:
            if isinstance(task, TileTask):
                rebuild(task, width, codecs, read)
        except InvalidRequest:
            patch = way[length - 1][1]
            return patch.base.version, patch.version.version
    return None
