"""Takes a version in from a publisher or from the upstream (`arriving`): stages it, stores its blobs, commits it."""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, NotReady
from ebbtide.types.weights import Manifest, Patch, PolicyVersion, VersionInfo
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.keyframe_builder import KeyframeBuilder
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.library.publisher_trust import PublisherTrust
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.run_ends import EndedRuns
from ebbtide.weight_relay.library.version_index import (
    Claim,
    HeldManifest,
    PatchEdge,
    VersionStage,
    dense_bytes,
    make_stage,
    on_disk,
)
from ebbtide.weight_relay.library.version_library import VersionLibrary, named
from ebbtide.weight_relay.retention import RetentionPlan
from ebbtide.weights import check_tile, mark_missing, same_geometry

log = telemetry.get_logger(__name__)

#: Publishes at once, since each stage takes memory for its manifest and room in the budget; and those of one run, so
#: that no run keeps the others out.
MAX_STAGES: Final = 16
MAX_STAGES_OF_RUN: Final = 4
#: Seconds of silence after which a publisher makes room for another when all stages are taken.
_SILENT_S: Final = 60.0


class VersionIntake:
    def __init__(
        self,
        library: VersionLibrary,
        collector: GarbageCollector,
        keys: PublisherTrust,
        codecs: TileCodecs,
        ended: EndedRuns,
        keyframes: KeyframeBuilder,
    ) -> None:
        self._library, self._collector, self._keys = library, collector, keys
        self._codecs, self._ended, self._keyframes = codecs, ended, keyframes

    async def begin(self, manifest: Manifest, patch: Patch | None = None, *, arriving: bool = False) -> list[bytes]:
        """Stage a version. Returns the blobs to put, in order; none if it is committed already.

        They are the patch's blobs, or without one all dense tiles. `arriving`: the version comes from upstream and may
        be read at once; its patch need not be signed, and the patch's base may be arriving too.
        Raises `InvalidRequest` and `ChunkCorrupt` as `check_manifest` and `check_patch`, `PermissionDenied` if the
        run's publisher has not signed, `LeaseSuperseded` if the run has ended, `AlreadyExists` if the number has
        another root, `NotReady` if the patch's base is not here, `NoCapacity` if it does not fit beside what must stay.
        """
        self._ended.refuse(manifest.run_id)
        self._keys.check(manifest, patch, arriving=arriving)
        self._codecs.warm()
        now = self._library.clock()
        stage = await asyncio.to_thread(make_stage, manifest, patch, self._library.limits, arriving=arriving, now=now)
        return await self._library.finish(self._begin(stage))

    async def _begin(self, stage: VersionStage) -> list[bytes]:
        index = self._library.index
        async with self._library.lock:
            # The run may have ended meanwhile. An end from here on waits for the lock, and finds the stage and the pin.
            self._ended.refuse(stage.manifest.run_id)
            if index.check_same(stage.manifest.run_id, stage.manifest.version):
                return []
            self._check_base(stage, arriving=stage.arriving)
            before = index.stage_of(stage.stream, stage.number)
            index.stage(stage)
            try:
                await self._make_room(stage)
                await self._keys.pin(stage.manifest)
                if stage.arriving:
                    with disk_errors():
                        await asyncio.to_thread(self._library.disk.put_arrival, stage.manifest, stage.patch)
            except EbbtideError:
                await self._collector.unstage(stage)
                raise
            if before is not None:
                self._library.wake()
            return list(index.missing(stage))

    def _check_base(self, stage: VersionStage, *, arriving: bool) -> None:
        """A patch needs a base that is here, or that is arriving too."""
        if stage.patch is None:
            return
        index, base = self._library.index, stage.patch.base
        found = index.whole(stage.stream).get(base.version)
        manifest = found.manifest if found else None
        if manifest is None and arriving and (other := index.stage_of(stage.stream, base.version, arriving=True)):
            manifest = other.manifest
        if manifest is None or manifest.version.root != base.root:
            raise NotReady(f"version {base.version}, the base of the patch, is not held here; publish all of it")
        if not same_geometry(manifest, stage.manifest):
            raise NotReady(f"version {base.version} has other tensors or pieces than the patch; publish all of it")

    async def _make_room(self, stage: VersionStage) -> None:
        if not stage.arriving:
            await self._make_stage_room(stage)
        plan = await self._collector.plan()
        self._check_room(plan, stage)
        await self._collector.follow(plan)

    async def _make_stage_room(self, stage: VersionStage) -> None:
        """Keep the stages within their limits. Raises `NoCapacity` if no publisher of another run is silent.

        Of one run, the stage that was silent longest gives way at once: the holders of one lease publish one after
        another, so it belongs to a trainer that died.
        """
        stages = [other for other in self._library.index.stages if not other.arriving and other is not stage]
        own = [other for other in stages if other.stream[0] == stage.stream[0]]
        if len(own) >= MAX_STAGES_OF_RUN:
            await self._give_way(min(own, key=lambda other: other.used_at))
            return
        if len(stages) < MAX_STAGES:
            return
        silent = min(stages, key=lambda other: other.used_at)
        if self._library.clock() - silent.used_at < _SILENT_S:
            raise NoCapacity(f"{MAX_STAGES} publishes are under way at this relay; retry later", retry_after_s=5.0)
        await self._give_way(silent)

    async def _give_way(self, silent: VersionStage) -> None:
        await self._collector.unstage(silent)
        log.warning("silent publisher gives way", run_id=silent.stream[0], **named(silent.manifest.version))

    def _check_room(self, plan: RetentionPlan, stage: VersionStage) -> None:
        size = sum(map(on_disk, (stage.blobs | stage.record).values()))
        settings = self._library.settings
        if over := plan.over_quota.get(stage.stream[0]):
            raise NoCapacity(
                f"{size} bytes exceed by {over} what the quota of {settings.run_quota_bytes} bytes leaves the run "
                "in addition to what it must keep; raise --run-quota-bytes",
                retry_after_s=30.0,
            )
        if plan.excess_bytes:
            raise NoCapacity(
                f"{size} bytes exceed by {plan.excess_bytes} what the relay's budget of {settings.budget_bytes} bytes "
                "leaves in addition to the newest version of each live policy; raise --budget-bytes",
                retry_after_s=30.0,
            )

    async def put(self, digest: bytes, data: bytes, *, verified: bool = False) -> None:
        """Verify and store a blob that a stage needs. `verified`: it has matched its digest already.

        Raises `InvalidRequest` if no stage needs it, or if its size or its tile patch differs from what the stages
        say; `ChunkCorrupt` if it is damaged.
        """
        index = self._library.index
        claims = index.wanted(digest, self._library.clock())
        if digest in index.on_disk:
            return
        with disk_errors():
            wrong = await asyncio.to_thread(self._verify_and_write, digest, data, claims, verified)
        self._library.stored(digest, len(data))
        index.refute(digest, wrong)
        metrics.BYTES_IN.inc(len(data))

    def _verify_and_write(self, digest: bytes, data: bytes, claims: set[Claim], verified: bool) -> set[Claim]:
        """Store a blob if any claim is right, so that one run's claim cannot keep another's blob away.

        Returns the wrong claims. Raises the fault of one if all are wrong.
        """
        if not verified:
            check_tile(digest, data)
        wrong: dict[Claim, InvalidRequest] = {}
        for claim in claims:
            try:
                self._check_claim(digest, data, claim)
            except InvalidRequest as error:
                wrong[claim] = error
        if len(wrong) == len(claims):
            raise wrong.popitem()[1]
        self._library.disk.put_tile(digest, data)
        return set(wrong)

    def _check_claim(self, digest: bytes, data: bytes, claim: Claim) -> None:
        size, units = claim
        if len(data) != size:
            raise InvalidRequest(f"tile {digest.hex()} has {len(data)} bytes, not {size}", field="tensors.digests")
        if units is not None:
            self._codecs.of(units[0]).check(data, units[1])

    async def sync(self) -> None:
        """See `VersionLibrary.sync`."""
        await self._library.sync()

    def missing(self, run_id: str, version: PolicyVersion) -> bytes | None:
        """The blobs that a staged version lacks (`mark_missing`); None if it is not staged here."""
        stage = self._library.index.stage_of((run_id, version.policy), version.version)
        if stage is None or stage.manifest.version != version:
            return None
        stage.used_at = self._library.clock()
        return mark_missing(stage.blobs, self._library.index.on_disk)

    async def commit(self, run_id: str, version: PolicyVersion) -> VersionInfo:
        """Make a staged version visible. Idempotent. Raises `NotReady` while blobs or the patch's base are missing, and
        `InvalidRequest` if a blob that came for another version does not fit this one."""
        info = await self._library.finish(self._commit(run_id, version))
        self._keyframes.consider()
        return info

    async def _commit(self, run_id: str, version: PolicyVersion) -> VersionInfo:
        index = self._library.index
        async with self._library.lock:
            if held := index.check_same(run_id, version):
                return held.info
            stage = index.staged(run_id, version)
            self._check_base(stage, arriving=False)
            await self._library.sync()
            with disk_errors():
                await asyncio.to_thread(self._record, stage)
            holding, edge = self._committed(stage)
            index.commit(holding, edge)
            self._library.announce()
            log.info(
                "version committed",
                run_id=run_id,
                **named(version),
                bytes=sum(stage.blobs.values()),
                dense_bytes=dense_bytes(stage.manifest),
                step=version.step,
            )
            await self._collector.tidy()
        return holding.info

    def _record(self, stage: VersionStage) -> None:
        if stage.patch is not None:
            self._library.disk.put_patch(stage.patch)
        self._library.disk.put_manifest(stage.manifest, keyframe=stage.patch is None)
        if stage.arriving:
            self._library.disk.drop_arrival(stage.stream, stage.number)

    def _committed(self, stage: VersionStage) -> tuple[HeldManifest, PatchEdge | None]:
        now, patch = self._library.clock(), stage.patch
        tiles = {} if patch is not None else stage.blobs
        holding = HeldManifest(manifest=stage.manifest, keyframe=patch is None, tiles=tiles, used_at=now, since=now)
        if patch is None:
            return holding, None
        return holding, PatchEdge(patch=patch, blobs=stage.blobs, composed=False, used_at=now)

    async def abandon(self, run_id: str, policy: str, version: int) -> None:
        """Give an arriving version up. Readers that wait for its blobs get `VersionUnavailable`."""
        await self._library.finish(self._abandon(run_id, policy, version))

    async def _abandon(self, run_id: str, policy: str, version: int) -> None:
        async with self._library.lock:
            if stage := self._library.index.stage_of((run_id, policy), version, arriving=True):
                await self._collector.unstage(stage)
                await self._collector.tidy()
