"""The relay's use-cases: stage, fill, commit, read, watch, let go.

Invariant: what `index` calls committed lies whole and durable on disk. Commits, evictions and stages change under one
lock; tiles are written beside it, each verified first. When the process dies here, stages are gone and committed
versions are found again by `open`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, InvalidRequest, NoCapacity, VersionUnavailable
from ebbtide.scheduling.retention import RetentionPlan, plan_retention
from ebbtide.types.weights import Manifest, PolicyVersion, VersionInfo
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.disk import Disk, disk_errors
from ebbtide.weight_relay.index import Holding, Index, Stream
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import Limits, check_manifest, check_tile

T = TypeVar("T")
log = telemetry.get_logger(__name__)

#: Live publishers at once: each stage costs memory for its manifest, and room in the budget.
MAX_STAGES: Final = 16


class Relay:
    def __init__(self, settings: RelaySettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.limits = Limits(bytes=settings.budget_bytes)
        self.index = Index()
        self._clock = clock
        self._disk = Disk(Path(settings.data_dir))
        self._lock = asyncio.Lock()
        self._unsynced: set[bytes] = set()
        self._changed = asyncio.Event()
        self._unbroken: set[asyncio.Task[object]] = set()

    async def open(self) -> None:
        """Find the versions on disk and delete everything else. Looks at sizes alone; digests are checked at reads.

        Raises `InvalidRequest` for what can be neither read nor deleted.
        """
        try:
            manifests, refusals = await asyncio.to_thread(self._disk.load)
        except OSError as error:
            text = f"{error.filename} cannot be read or deleted ({error.strerror}); remove it"
            raise InvalidRequest(text, field="data_dir") from None
        for refusal in refusals:
            log.warning("version refused", path=refusal.path, reason=refusal.reason)
        now = self._clock()
        for manifest in manifests:
            holding = self.index.stage(manifest, now)
            self.index.on_disk.update(holding.tiles)
            self.index.commit(holding)
        async with self._lock:
            await self._evict(self._plan())
        log.info("versions found", versions=len(manifests), bytes=sum(self.index.on_disk.values()))

    async def close(self) -> None:
        """Let changes under way finish, then give up the directory."""
        await asyncio.gather(*self._unbroken, return_exceptions=True)
        self._disk.close()

    # -- publish -------------------------------------------------------------------------------------------------

    async def begin(self, manifest: Manifest) -> list[bytes]:
        """Stage a version and say which of its tiles to put; none if it is committed already.

        Raises `InvalidRequest` and `ChunkCorrupt` as `check_manifest`, `AlreadyExists` if the number has another root,
        `NoCapacity` if it does not fit beside what must stay.
        """
        await asyncio.to_thread(check_manifest, manifest, self.limits)
        return await self._finish(self._begin(manifest))

    async def _begin(self, manifest: Manifest) -> list[bytes]:
        async with self._lock:
            if self.index.check_same(manifest.run_id, manifest.version):
                return []
            holding = self.index.stage(manifest, self._clock())
            try:
                await self._make_room(holding)
            except EbbtideError:
                self.index.unstage(holding)
                raise
            return list(self.index.missing(holding))

    async def _make_room(self, holding: Holding) -> None:
        if len(self.index.stages) > MAX_STAGES:
            raise NoCapacity(f"{MAX_STAGES} publishes are under way at this relay; retry later", retry_after_s=5.0)
        plan = self._plan()
        if plan.excess_bytes:
            size, budget = sum(holding.tiles.values()), self.settings.budget_bytes
            raise NoCapacity(
                f"{size} bytes exceed by {plan.excess_bytes} what the relay's budget of {budget} bytes leaves beside "
                "the newest version of each live policy; raise --budget-bytes",
                retry_after_s=30.0,
            )
        await self._evict(plan)

    async def put(self, digest: bytes, data: bytes) -> None:
        """Verify and store a tile that a stage wants (`InvalidRequest` if none does, `ChunkCorrupt` if damaged)."""
        size = self.index.wanted(digest, self._clock())
        if digest in self.index.on_disk:
            return
        with disk_errors():
            await asyncio.to_thread(self._verify_and_write, digest, data, size)
        self._unsynced.add(digest)
        self.index.stored(digest, size)
        metrics.BYTES_IN.inc(size)

    def _verify_and_write(self, digest: bytes, data: bytes, size: int) -> None:
        check_tile(digest, data, size)
        self._disk.put_tile(digest, data)

    async def sync(self) -> None:
        """Make the tiles put so far durable, so that the commit, which has a deadline, need not."""
        digests = list(self._unsynced)
        with disk_errors():
            await asyncio.to_thread(self._disk.sync_tiles, digests)
        self._unsynced.difference_update(digests)

    async def commit(self, run_id: str, version: PolicyVersion) -> VersionInfo:
        """Make a staged version visible. Raises `NotReady` while tiles are missing. Idempotent."""
        return await self._finish(self._commit(run_id, version))

    async def _commit(self, run_id: str, version: PolicyVersion) -> VersionInfo:
        async with self._lock:
            if held := self.index.check_same(run_id, version):
                return held.info
            holding = self.index.staged(run_id, version)
            await self.sync()
            with disk_errors():
                await asyncio.to_thread(self._disk.put_manifest, holding.manifest)
            holding.used_at = self._clock()
            self.index.commit(holding)
            self._announce()
            log.info("version committed", run_id=run_id, **_named(version), bytes=holding.info.size, step=version.step)
            await self._evict(self._plan())
        return holding.info

    # -- read ----------------------------------------------------------------------------------------------------

    def manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """The manifest of a committed version, or of the newest for 0. Raises `VersionUnavailable`."""
        holding = self.index.find(run_id, policy, version)
        holding.used_at = self._clock()
        return holding.manifest

    async def tile(self, digest: bytes) -> bytes:
        """A tile of a committed version, verified. Raises `VersionUnavailable` if none has it.

        Raises `ChunkCorrupt` if the disk does not hold it as it was; its versions are let go then, never served again.
        """
        if not self.index.serves(digest):
            raise VersionUnavailable(f"no version held here has tile {digest[:32].hex()}; ask for the manifest again")
        try:
            with disk_errors():
                data = await asyncio.to_thread(self._read_verified, digest)
        except (FileNotFoundError, ChunkCorrupt) as error:
            raise await self._finish(self._withdraw(digest, str(error))) from None
        metrics.BYTES_OUT.inc(len(data))
        return data

    def _read_verified(self, digest: bytes) -> bytes:
        data = self._disk.get_tile(digest)
        check_tile(digest, data)
        return data

    async def watch(self, run_id: str, policy: str) -> AsyncIterator[VersionInfo]:
        """The versions held, oldest first, then each as it is committed; be it let go while others are told."""
        seen: set[int] = set()
        while True:
            changed = self._changed
            held = dict(self.index.stream((run_id, policy)))
            for version in sorted(held.keys() - seen):
                yield held[version].info
            seen = set(held)
            await changed.wait()

    # -- let go --------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """For ever: forget stages of publishers that went silent, and delete their tiles."""
        while True:
            await asyncio.sleep(self.settings.stage_ttl_s / 4)
            await self._finish(self.drop_dead_stages())

    async def drop_dead_stages(self) -> None:
        async with self._lock:
            oldest = self._clock() - self.settings.stage_ttl_s
            for holding in self.index.stages:
                if holding.used_at < oldest:
                    self.index.unstage(holding)
                    log.warning("publisher is gone", run_id=holding.stream[0], **_named(holding.manifest.version))
            await self._evict(self._plan())

    def _plan(self) -> RetentionPlan:
        incoming: dict[bytes, int] = {}
        for stage in self.index.stages:
            incoming |= stage.tiles
        return plan_retention(
            self.index.held_versions(self._clock()),
            keep_versions=self.settings.keep_versions,
            budget_bytes=self.settings.budget_bytes,
            abandoned_s=self.settings.abandoned_s,
            incoming=incoming,
        )

    async def _evict(self, plan: RetentionPlan) -> None:
        for item in plan.evict:
            await self._remove(item.stream, item.version)
            log.info("version let go", run_id=item.stream[0], policy=item.stream[1], version=item.version)
        await self._drop_garbage()

    async def _remove(self, stream: Stream, version: int) -> None:
        with disk_errors():
            await asyncio.to_thread(self._disk.drop_manifest, *stream, version)
        self.index.evict(stream, version)

    async def _drop_garbage(self) -> None:
        garbage = self.index.garbage()
        self.index.forget(garbage)
        self._unsynced.difference_update(garbage)
        with disk_errors():
            await asyncio.to_thread(self._disk.drop_tiles, garbage)
        metrics.VERSIONS.set(sum(1 for _ in self.index.committed()))
        metrics.BYTES_HELD.set(sum(self.index.on_disk.values()))

    async def _withdraw(self, digest: bytes, reason: str) -> EbbtideError:
        async with self._lock:
            if not (owners := self.index.owners(digest)):
                return VersionUnavailable("the version was let go while it was read; ask for a newer one")
            for holding in owners:
                await self._remove(holding.stream, holding.manifest.version.version)
                log.error(
                    "version damaged", run_id=holding.stream[0], **_named(holding.manifest.version), reason=reason
                )
            metrics.CORRUPT.inc()
            self.index.forget([digest])
            await asyncio.to_thread(self._disk.drop_tiles, [digest])
            await self._drop_garbage()
        return ChunkCorrupt(f"tile {digest.hex()} is damaged on the relay's disk; publish its versions again")

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Bring `work` to its end even if its caller goes away: disk and index change together."""
        task = asyncio.ensure_future(work)
        self._unbroken.add(task)
        task.add_done_callback(self._unbroken.discard)
        return await asyncio.shield(task)


def _named(version: PolicyVersion) -> dict[str, object]:
    return {"policy": version.policy, "version": version.version}
