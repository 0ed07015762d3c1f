"""Drops versions that retention plans to drop, damaged ones, and abandoned stages, all under the library's lock."""

import asyncio
from typing import Final

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, VersionUnavailable
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.holder_table import HolderTable
from ebbtide.weight_relay.library.publisher_trust import PublisherTrust
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_index import (
    BLOCK,
    Ends,
    HeldManifest,
    PatchEdge,
    StageProgress,
    VersionStage,
    dense_bytes,
    on_disk,
)
from ebbtide.weight_relay.library.version_library import VersionLibrary, named
from ebbtide.weight_relay.retention import (
    HeldPatch,
    HeldVersion,
    Node,
    RetentionPlan,
    RetentionRules,
    Stream,
    plan_retention,
)
from ebbtide.weight_relay.version_paths import passages

log = telemetry.get_logger(__name__)
#: Seconds after a start within which holders report: several of their rounds.
_GRACE_S: Final = 60.0


class GarbageCollector:
    def __init__(self, library: VersionLibrary, keys: PublisherTrust, holders: HolderTable) -> None:
        self._library, self._keys, self._holders = library, keys, holders
        settings = library.settings
        self._rules = RetentionRules(
            keep_versions=settings.keep_versions,
            budget_bytes=settings.budget_bytes,
            abandoned_s=settings.abandoned_s,
            max_age_s=settings.max_age_s,
            run_quota_bytes=settings.run_quota_bytes,
            block_bytes=BLOCK,
        )
        self._found: set[Node] = set()
        self._found_at = 0.0
        #: Kept versions that should become keyframes so that others can be dropped, by the last plan.
        self.wanted_keyframes: tuple[Node, ...] = ()

    def spare_found(self) -> None:
        """Treat the versions found at the start as needed until holders have had time to report."""
        index = self._library.index
        self._found = {(stream, version) for stream in index.streams() for version in index.stream(stream)}
        self._found_at = self._library.clock()

    # -- plans ---------------------------------------------------------------------------------------------------

    async def plan(self) -> RetentionPlan:
        """Plan what to drop now, in a thread since it counts every blob."""
        index, now = self._library.index, self._library.clock()
        versions = [self._held_version(item, now) for item in index.committed()]
        patches = [
            _held_patch(stream, edge, now) for stream in index.streams() for edge in index.patches(stream).values()
        ]
        incoming: dict[str, dict[bytes, int]] = {}
        pinned: set[Node] = set()
        for stage in index.stages:
            incoming.setdefault(stage.stream[0], {}).update(stage.blobs | stage.record)
            if stage.patch is not None:
                pinned.add((stage.stream, stage.patch.base.version))
        for making in index.making:
            incoming.setdefault(making.stream[0], {}).update(making.blobs)
            pinned.update((making.stream, version) for version in making.versions)
        needed = self._holders.needed()
        if self._found and now < self._found_at + _GRACE_S:
            needed = needed | self._found
        rules = replace(self._rules, budget_bytes=self._budget())
        return await asyncio.to_thread(
            plan_retention, versions, patches, rules=rules, incoming=incoming, needed=needed, pinned=pinned
        )

    def _budget(self) -> int:
        """The budget for versions and patches, without the files of publishers' keys, which stay."""
        return max(0, self._rules.budget_bytes - BLOCK * self._keys.pins)

    def _held_version(self, item: HeldManifest, now: float) -> HeldVersion:
        return HeldVersion(
            stream=item.stream,
            version=item.number,
            tiles=item.tiles,
            record=item.record,
            keyframe=item.keyframe,
            size=dense_bytes(item.manifest),
            idle_s=now - item.used_at,
            age_s=now - item.since,
            elsewhere=self._holders.lasting(item.stream, item.number) > 0,
        )

    def room(self, run_id: str) -> int:
        """Bytes that the budget and the run's quota leave free now."""
        index = self._library.index
        rooms = [self._budget() - index.bytes]
        if self._rules.run_quota_bytes:
            own: dict[bytes, int] = {}
            for stream in index.streams():
                if stream[0] == run_id:
                    for holding in index.stream(stream).values():
                        own |= holding.tiles | holding.record
                    for edge in index.patches(stream).values():
                        own |= edge.blobs | edge.record
            rooms.append(self._rules.run_quota_bytes - sum(map(on_disk, own.values())))
        return min(rooms)

    async def follow(self, plan: RetentionPlan) -> None:
        """Drop manifests, then patches, then blobs, each step durable before the next."""
        self.wanted_keyframes = plan.keyframes
        index = self._library.index
        for item in plan.evict:
            if item.version in index.stream(item.stream):
                await self._remove(item.stream, item.version)
                log.info("version let go", run_id=item.stream[0], policy=item.stream[1], version=item.version)
        for item in plan.thin:
            await self._thin(index.stream(item.stream)[item.version])
        for patch in plan.patches:
            if (patch.base, patch.version) in index.patches(patch.stream):
                await self._cut(index.patches(patch.stream)[patch.base, patch.version])
        await self._library.drop_garbage()

    async def tidy(self) -> None:
        """Plan, and follow the plan."""
        await self.follow(await self.plan())

    async def made(self, making: StageProgress) -> None:
        """Drop unused blobs of `making`, and versions that stayed for it. Takes the lock; logs errors of the disk."""
        self._library.index.made(making)
        async with self._library.lock:
            try:
                await self.tidy()
            except (EbbtideError, OSError) as error:
                log.warning("unused blobs are still on disk", run_id=making.stream[0], error=str(error))

    async def _remove(self, stream: Stream, version: int) -> None:
        index, disk = self._library.index, self._library.disk
        edges = [ends for ends in index.patches(stream) if version in ends]
        with disk_errors():
            await asyncio.to_thread(disk.drop_manifest, *stream, version)
            for ends in edges:
                await asyncio.to_thread(disk.drop_patch, stream, ends)
        index.evict(stream, version)

    async def _thin(self, holding: HeldManifest) -> None:
        with disk_errors():
            await asyncio.to_thread(self._library.disk.mark, holding.stream, holding.number, keyframe=False)
        self._library.index.thin(holding)

    async def _cut(self, edge: PatchEdge) -> None:
        stream = edge.patch.run_id, edge.patch.version.policy
        with disk_errors():
            await asyncio.to_thread(self._library.disk.drop_patch, stream, edge.ends)
        self._library.index.cut(stream, edge.ends)

    # -- stages --------------------------------------------------------------------------------------------------

    async def unstage(self, stage: VersionStage) -> None:
        """Give a stage up; its blobs become garbage. The stage stays if the disk fails."""
        self._library.index.unstage(stage)
        if not stage.arriving:
            return
        try:
            with disk_errors():
                await asyncio.to_thread(self._library.disk.drop_arrival, stage.stream, stage.number)
        except EbbtideError:
            self._library.index.stage(stage)
            raise
        self._library.wake()

    def held(self) -> set[str]:
        """The runs that this relay keeps anything of."""
        return self._library.index.runs() | self._keys.runs

    async def forget_run(self, run_id: str) -> None:
        """Drop everything of a run that has ended."""
        await self._library.finish(self._forget_run(run_id))

    async def _forget_run(self, run_id: str) -> None:
        library = self._library
        async with library.lock:
            for stage in library.index.stages:
                if stage.stream[0] == run_id:
                    await self.unstage(stage)
            for stream in [stream for stream in library.index.streams() if stream[0] == run_id]:
                for version in list(library.index.stream(stream)):
                    await self._remove(stream, version)
            await library.drop_garbage()
        await self._keys.unpin(run_id)
        library.announce()

    async def drop_garbage(self) -> None:
        """Delete blobs that came while the stages that needed them were dropped."""
        async with self._library.lock:
            await self._library.drop_garbage()

    async def drop_dead_stages(self) -> None:
        library = self._library
        async with library.lock:
            oldest = library.clock() - library.settings.stage_ttl_s
            for stage in library.index.stages:
                if stage.used_at < oldest:
                    await self.unstage(stage)
                    log.warning("publisher is gone", run_id=stage.stream[0], **named(stage.manifest.version))
            await self.tidy()

    # -- damage --------------------------------------------------------------------------------------------------

    async def withdraw_blob(self, digest: bytes, reason: str) -> EbbtideError:
        """Drop all that needs a damaged blob, and versions that no way leads to then. Returns the error to raise."""
        library = self._library
        async with library.lock:
            holdings, edges = library.index.owners(digest)
            if not holdings and not edges:
                if library.index.arriving(digest):
                    await self._forget(digest)
                return VersionUnavailable("the version was dropped while it was read; ask for a newer one")
            for holding in holdings:
                await self._thin(holding)
                log.error(
                    "keyframe damaged", run_id=holding.stream[0], **named(holding.manifest.version), reason=reason
                )
            for edge in edges:
                await self._cut(edge)
                version = edge.patch.version
                log.error("patch damaged", run_id=edge.patch.run_id, **named(version), base=edge.ends[0], reason=reason)
            metrics.CORRUPT.inc()
            await self._forget(digest)
            await self._prune()
        return ChunkCorrupt(f"tile {digest.hex()} is damaged on the relay's disk; publish its versions again")

    async def _forget(self, digest: bytes) -> None:
        self._library.index.forget([digest])
        with disk_errors():
            await asyncio.to_thread(self._library.disk.drop_tiles, [digest])

    async def withdraw_patch(self, stream: Stream, ends: Ends) -> None:
        """Drop a patch that does not make its version, and versions that no way leads to then."""
        index = self._library.index
        async with self._library.lock:
            if edge := index.patches(stream).get(ends):
                await self._cut(edge)
                log.error("patch withdrawn", run_id=stream[0], **named(edge.patch.version), base=ends[0])
            if ends[1] in index.stream(stream) and ends[1] not in index.whole(stream):
                await self._remove(stream, ends[1])
            await self._prune()

    async def _prune(self) -> None:
        index = self._library.index
        for stream in index.streams():
            stay = passages(index.whole(stream), index.steps(stream))
            for version in sorted(index.stream(stream).keys() - stay):
                await self._remove(stream, version)
                log.warning("no way is left to version", run_id=stream[0], policy=stream[1], version=version)
        await self._library.drop_garbage()


def _held_patch(stream: Stream, edge: PatchEdge, now: float) -> HeldPatch:
    base, version = edge.ends
    return HeldPatch(
        stream=stream,
        base=base,
        version=version,
        blobs=edge.blobs,
        record=edge.record,
        composed=edge.composed,
        idle_s=now - edge.used_at,
    )
