"""Changes the relay's versions on disk and in memory together.

Invariant: what `index` calls committed is whole and durable on `disk`. Versions, patches, stages and keyframes change
under `lock`, in `finish`, so that a caller that goes away leaves nothing half done. Blobs are verified, then written
without the lock. After the process dies, publishers' stages are gone, and `relay_disk.recover` finds everything else.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import PolicyVersion
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.library.relay_disk import RecoveredDisk, RelayDisk, disk_errors, recover
from ebbtide.weight_relay.library.version_index import (
    HeldManifest,
    PatchEdge,
    StageProgress,
    VersionIndex,
    VersionStage,
)
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import ManifestLimits, blob_sizes, check_tile, tile_sizes

T = TypeVar("T")
log = telemetry.get_logger(__name__)


class VersionLibrary:
    def __init__(self, settings: RelaySettings, disk: RelayDisk, clock: Callable[[], float]) -> None:
        self.settings, self.disk, self.clock = settings, disk, clock
        self.limits = ManifestLimits(bytes=settings.budget_bytes)
        self.index = VersionIndex()
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()
        self._unsynced: set[bytes] = set()
        self._unbroken: set[asyncio.Task[object]] = set()
        self._arrivals: dict[bytes, asyncio.Event] = {}

    async def open(self) -> None:
        """Find what is whole on disk and delete the rest. Raises `InvalidRequest` for a file that resists both."""
        try:
            found = await asyncio.to_thread(recover, self.disk, self.limits)
        except OSError as error:
            text = f"{error.filename} cannot be read or deleted ({error.strerror}); remove it"
            raise InvalidRequest(text, field="data_dir") from None
        for refusal in found.refusals:
            log.warning("version refused", path=refusal.path, reason=refusal.reason)
        self._take(found)
        log.info("versions found", versions=len(found.manifests), bytes=self.index.bytes)

    def _take(self, found: RecoveredDisk) -> None:
        now = self.clock()
        for versions in found.versions.values():
            for item in versions.values():
                tiles = tile_sizes(item.manifest) if item.keyframe else {}
                self._lie_there(tiles)
                self.index.commit(
                    HeldManifest(manifest=item.manifest, keyframe=item.keyframe, tiles=tiles, used_at=now, since=now)
                )
        for patches in found.patches.values():
            for patch, composed in patches.values():
                blobs = blob_sizes(patch)
                self._lie_there(blobs)
                self.index.connect(PatchEdge(patch=patch, blobs=blobs, composed=composed, used_at=now))
        for stage in found.stages:
            self._take_stage(stage, now)

    def _lie_there(self, blobs: Mapping[bytes, int]) -> None:
        for digest, size in blobs.items():
            self.index.stored(digest, size)

    def _take_stage(self, stage: VersionStage, now: float) -> None:
        stage.used_at = now
        for digest, size in stage.blobs.items():
            if (self.disk.tiles / digest.hex()).exists():
                self.index.stored(digest, size)
                self._unsynced.add(digest)
        self.index.stage(stage)

    async def close(self) -> None:
        """Let changes under way finish, then give up the directory."""
        await asyncio.gather(*self._unbroken, return_exceptions=True)
        self.disk.close()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish `work` even if its caller goes away, so that disk and index change together."""
        task = asyncio.ensure_future(work)
        self._unbroken.add(task)
        task.add_done_callback(self._unbroken.discard)
        return await asyncio.shield(task)

    def announce(self) -> None:
        """Wake the tasks that wait for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def stored(self, digest: bytes, size: int) -> None:
        """Record a blob that was verified and written."""
        self._unsynced.add(digest)
        self.index.stored(digest, size)
        if event := self._arrivals.pop(digest, None):
            event.set()

    async def store_made(self, making: StageProgress, digest: bytes, data: bytes) -> None:
        """Write a blob that `making` has made and verified, unless it is on disk."""
        making.blobs[digest] = len(data)
        if digest not in self.index.on_disk:
            with disk_errors():
                await asyncio.to_thread(self.disk.put_tile, digest, data)
            self.stored(digest, len(data))

    async def sync(self) -> None:
        """Make the blobs stored so far durable, so that a commit, which has a deadline, need not."""
        digests = list(self._unsynced)
        with disk_errors():
            await asyncio.to_thread(self.disk.sync_tiles, digests)
        self._unsynced.difference_update(digests)

    def read_verified(self, digest: bytes) -> bytes:
        """Read a blob. Blocks. Raises `ChunkCorrupt`, and `FileNotFoundError` if it is gone."""
        data = self.disk.get_tile(digest)
        check_tile(digest, data)
        return data

    async def drop_garbage(self) -> None:
        """Delete the blobs that nothing holds, needs or makes. Under the lock."""
        garbage = self.index.take_garbage()
        self._unsynced.difference_update(garbage)
        with disk_errors():
            await asyncio.to_thread(self.disk.drop_tiles, garbage)
        metrics.VERSIONS.set(sum(1 for _ in self.index.committed()))
        metrics.KEYFRAMES.set(sum(1 for holding in self.index.committed() if holding.keyframe))
        metrics.PATCHES.set(sum(len(self.index.patches(stream)) for stream in self.index.streams()))
        metrics.BYTES_HELD.set(self.index.bytes)

    async def arrival(self, digest: bytes, timeout_s: float) -> None:
        """Wait until the blob comes, its stage changes, or `timeout_s` passes."""
        event = self._arrivals.setdefault(digest, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    def wake(self) -> None:
        """Wake all that wait for arrivals, since a stage has gone."""
        events, self._arrivals = self._arrivals, {}
        for event in events.values():
            event.set()


def named(version: PolicyVersion) -> dict[str, object]:
    """A version's fields in log lines."""
    return {"policy": version.policy, "version": version.version}
