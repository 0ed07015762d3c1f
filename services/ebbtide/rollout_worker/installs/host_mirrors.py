"""The mirror that this worker uses: that of its host, or one of its own where that one cannot be had.

Invariant: `current` is the one in use, None before the first. A host's mirror whose holder shows no sign of life is
left, and kept open: it is used again, from the next version on, once its holder has gone on or ended. Where the host
has no room for one, this worker has its own for good: to look for room anew may take it from others. When the process
dies, its own goes; the host's stays with the others, locked no more.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from ebbtide import telemetry
from ebbtide.errors import NoCapacity
from ebbtide.transfer import Mirror
from ebbtide.types.weights import Manifest
from ebbtide.weights import same_geometry

T = TypeVar("T")
log = telemetry.get_logger(__name__)

#: Longest time between two signs of life, and how many at least fall into somebody's patience.
_BEAT_S: Final = 1.0
_BEATS: Final = 4
#: To see whether a lock is free.
_GLANCE_S: Final = 0.05


class HostMirrors:
    """One mirror at a time."""

    def __init__(self, folder: Path | None, patience_s: float) -> None:
        """`folder`: of the host's mirrors; None for one of this worker's own. `patience_s`: after which a holder who
        shows no sign of life is taken for one that may never go on."""
        self._folder, self._patience_s = folder, patience_s
        self.current: Mirror | None = None
        self._left: Mirror | None = None
        self._beats = 0  # of the one that was left, when it was

    @property
    def shared(self) -> bool:
        """Whether the host's other workers find in it what this one fetched."""
        return self._folder is not None and self._left is None

    @asynccontextmanager
    async def locked(self, manifest: Manifest, *, shared: bool = False) -> AsyncIterator[Mirror]:
        """The mirror for a version while nobody else changes it; `shared` with those who install from it.

        Raises `NoCapacity` if there is none, and no memory for one.
        """
        async with AsyncExitStack() as stack:
            mirror = await self._open(manifest)
            while True:
                beats = mirror.beats
                try:
                    async with asyncio.timeout(self._patience_s):
                        await stack.enter_async_context(mirror.hold(shared=shared))
                    break
                except TimeoutError:
                    if mirror.beats == beats and self.shared:
                        mirror = await self._leave(mirror, manifest)
            yield mirror

    @asynccontextmanager
    async def at_work(self, mirror: Mirror, most_s: float = math.inf) -> AsyncIterator[None]:
        """Show those who wait for a locked mirror that this worker goes on, for so long at most."""
        beating = asyncio.create_task(self._beat(mirror, most_s), name="signs of life")
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _beat(self, mirror: Mirror, most_s: float) -> None:
        loop, pause_s = asyncio.get_running_loop(), min(_BEAT_S, self._patience_s / _BEATS)
        end = loop.time() + most_s
        while loop.time() < end:
            mirror.beat()
            await asyncio.sleep(pause_s)

    async def come_back(self) -> None:
        """Use the host's mirror again, if it was left and its holder has gone on or ended."""
        left = self._left
        if left is None or (left.beats == self._beats and not await _is_free(left)):
            return
        if self.current is not None:
            self.current.close()
        self.current, self._left = left, None
        log.info("the host's mirror is used again")

    async def _leave(self, mirror: Mirror, manifest: Manifest) -> Mirror:
        log.warning("the host's mirror stays locked: weights are kept in memory of this worker's own for now")
        self.current, self._left, self._beats = None, mirror, mirror.beats
        return await self._open(manifest)

    async def _open(self, manifest: Manifest) -> Mirror:
        """A mirror that has room for this version. Those for tensors of another kind go."""
        if self.current is not None and alike(self.current.manifest, manifest):
            return self.current
        if self._left is None or not alike(self._left.manifest, manifest):
            self.close()
        try:
            return await unbroken(asyncio.to_thread(self._make, manifest))
        except NoCapacity as error:
            if not self.shared:
                raise
            log.warning("weights are kept in memory of this worker's own", reason=str(error))
            self._folder = None
            return await unbroken(asyncio.to_thread(self._make, manifest))

    def _make(self, manifest: Manifest) -> Mirror:
        """In a thread: memory for it is found first."""
        self.current = mirror = Mirror(manifest, self._folder if self.shared else None)
        return mirror

    def forget(self, run_id: str) -> None:
        """Give up what is kept of a run that is over. Nobody here may be reading it."""
        if self.current is not None and self.current.manifest.run_id == run_id:
            self.current.close()
            self.current = None
        if self._left is not None and self._left.manifest.run_id == run_id:
            self._left.close()
            self._left = None

    def close(self) -> None:
        """Give them up. A host's goes when no other worker uses it."""
        for mirror in (self.current, self._left):
            if mirror is not None:
                mirror.close()
        self.current = self._left = None


async def _is_free(mirror: Mirror) -> bool:
    try:
        async with asyncio.timeout(_GLANCE_S), mirror.hold():
            return True
    except TimeoutError:
        return False


def alike(one: Manifest, other: Manifest) -> bool:
    """Whether two versions are of one run's policy, and of one geometry."""
    whose = [(manifest.run_id, manifest.version.policy) for manifest in (one, other)]
    return whose[0] == whose[1] and same_geometry(one, other)


async def unbroken(work: Awaitable[T]) -> T:
    """Wait for what goes on in a thread, also when cancelled: nobody else may touch the same meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
