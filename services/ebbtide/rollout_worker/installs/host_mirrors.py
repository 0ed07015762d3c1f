"""Chooses and locks the mirror that this worker uses: the host's, or one of its own where the host's cannot be had.

Invariant: `current` is the mirror in use, None before the first. This worker leaves a host's mirror whose holder shows
no sign of life, and keeps it open: it uses it again, from the next version on, once the holder has gone on or ended.
Where the host has no room for a mirror, this worker has its own for good: another look for room may take it from
others. When the process dies, its own mirror goes; the host's stays with the others, and is locked no more.
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

#: Longest time between two signs of life.
_BEAT_S: Final = 1.0
#: At least so many signs of life fall into the patience of another worker.
_BEATS: Final = 4
#: Time to see whether a lock is free.
_GLANCE_S: Final = 0.05


class HostMirrors:
    """One mirror at a time."""

    def __init__(self, folder: Path | None, patience_s: float) -> None:
        """`folder`: of the host's mirrors; None for one of this worker's own. `patience_s`: after which a holder that
        shows no sign of life is taken for one that never goes on."""
        self._folder, self._patience_s = folder, patience_s
        self.current: Mirror | None = None
        self._left: Mirror | None = None  # the host's, while its holder shows no sign of life
        self._beats = 0  # of that one, when it was left

    @property
    def shared(self) -> bool:
        """Whether the host's other workers find in the mirror what this one fetched."""
        return self._folder is not None and self._left is None

    @asynccontextmanager
    async def locked(self, manifest: Manifest, *, shared: bool = False) -> AsyncIterator[Mirror]:
        """The mirror for a version while no other process changes it; `shared` with those that install from it.

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
        """Show the workers that wait for a locked mirror that this one goes on, for `most_s` at most."""
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
        """A mirror that has room for this version. Mirrors of another geometry are closed."""
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
        """Runs in a thread, as it waits for memory."""
        self.current = mirror = Mirror(manifest, self._folder if self.shared else None)
        return mirror

    def forget(self, run_id: str) -> None:
        """Close the mirrors of a run that is over. The engine must not be reading them."""
        if self.current is not None and self.current.manifest.run_id == run_id:
            self.current.close()
            self.current = None
        if self._left is not None and self._left.manifest.run_id == run_id:
            self._left.close()
            self._left = None

    def close(self) -> None:
        """Close the mirrors. The host's goes when no other worker uses it."""
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
    """Wait for the work of a thread to its end, also when cancelled: nothing else may touch the same data meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
