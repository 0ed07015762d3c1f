"""Chooses and locks the mirror that this worker uses: the host's, or one of its own.

Invariant: `current` is the mirror in use, None before the first. This worker leaves a host's mirror whose holder shows
no sign of life, but keeps it open, and uses it again for the next version after the holder has gone on or ended. Where
the host has no room for a mirror, this worker keeps its own for good: trying again may take room from others. When the
process dies, its own mirror goes; the host's stays with the others, unlocked.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.transfer import Mirror
from ebbtide.types.weights import Manifest
from ebbtide.weights import same_geometry

T = TypeVar("T")
log = telemetry.get_logger(__name__)

#: Longest interval between signs of life.
_BEAT_S: Final = 1.0
#: Signs of life within another worker's patience, at least.
_BEATS: Final = 4
#: Time to see whether a lock is free.
_GLANCE_S: Final = 0.05
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class LeftMirror(NamedTuple):
    """The host's mirror while its holder shows no sign of life, and the count of signs when it was left."""

    mirror: Mirror
    beats: int


class HostMirrors:
    """Uses one mirror at a time."""

    def __init__(self, folder: Path | None, patience_s: float) -> None:
        """`folder`: of the host's mirrors; None for one of this worker's own. `patience_s`: the holder of a mirror is
        given up after so long without a sign of life."""
        self._folder, self._patience_s = folder, patience_s
        self.current: Mirror | None = None
        self._left: LeftMirror | None = None

    @property
    def shared(self) -> bool:
        """Whether the host's other workers find what this one fetched in the mirror."""
        return self._folder is not None and self._left is None

    @asynccontextmanager
    async def locked(self, manifest: Manifest, *, shared: bool = False) -> AsyncIterator[Mirror]:
        """The mirror for a version while no other process changes it; `shared` with others that install from it.
        Raises `NoCapacity` if there is no memory for one."""
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
        """Show signs of life to workers that wait for a locked mirror, for `most_s` at most."""
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
        if left is None or (left.mirror.beats == left.beats and not await _is_free(left.mirror)):
            return
        if self.current is not None:
            self.current.close()
        self.current, self._left = left.mirror, None
        log.info("the host's mirror is used again")

    async def _leave(self, mirror: Mirror, manifest: Manifest) -> Mirror:
        log.warning("the host's mirror stays locked: weights are kept in memory of this worker's own for now")
        self.current, self._left = None, LeftMirror(mirror, mirror.beats)
        return await self._open(manifest)

    async def _open(self, manifest: Manifest) -> Mirror:
        """A mirror that has room for this version. Closes mirrors of another geometry."""
        if self.current is not None and _alike(self.current.manifest, manifest):
            return self.current
        if self._left is None or not _alike(self._left.mirror.manifest, manifest):
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
        """Runs in a thread, because it waits for memory."""
        self.current = mirror = Mirror(manifest, self._folder if self.shared else None)
        return mirror

    def forget(self, run_id: str) -> None:
        """Close the mirrors of a finished run. The engine must not be reading them."""
        if self.current is not None and self.current.manifest.run_id == run_id:
            self.current.close()
            self.current = None
        if self._left is not None and self._left.mirror.manifest.run_id == run_id:
            self._left.mirror.close()
            self._left = None

    def close(self) -> None:
        """Close the mirrors. The host's mirror goes when no other worker uses it."""
        for mirror in (self.current, self._left.mirror if self._left else None):
            if mirror is not None:
                mirror.close()
        self.current = self._left = None


def host_name(folder: Path) -> str:
    """A name that exactly the processes share that find the same files in `folder`, which this makes (0700).

    Containers of one machine with shared memory of their own are hosts of their own. Raises `InvalidRequest`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        boot, found = _BOOT.read_text() if _BOOT.is_file() else "", folder.parent.stat()
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made ({error.strerror}); name another", field="mirror_dir") from None
    text = f"{boot} {found.st_dev} {found.st_ino} {folder.name}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def _is_free(mirror: Mirror) -> bool:
    try:
        async with asyncio.timeout(_GLANCE_S), mirror.hold():
            return True
    except TimeoutError:
        return False


def _alike(one: Manifest, other: Manifest) -> bool:
    """Whether two versions are of one run's policy, and of one geometry."""
    whose = [(manifest.run_id, manifest.version.policy) for manifest in (one, other)]
    return whose[0] == whose[1] and same_geometry(one, other)


async def unbroken(work: Awaitable[T]) -> T:
    """Wait for a thread's work to its end, also when cancelled: nothing else may touch the same data meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
