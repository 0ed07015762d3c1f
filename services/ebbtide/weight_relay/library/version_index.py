"""Indexes the versions, patches, stages and blobs that the relay holds.

Invariant: `on_disk` names every blob file, so all tiles of anchors and blobs of patches are in it. Every patch has both
its versions here. Only the relay's use cases write here, under the library's lock except for `stored` and `made`.
Publishers' stages live in memory alone: they die with the process, and the next start deletes their blobs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ebbtide.errors import AlreadyExists, InvalidRequest, NotReady, VersionUnavailable
from ebbtide.scheduling.distribution.retained_bytes import Node, Stream
from ebbtide.scheduling.distribution.version_paths import PatchStep, whole_versions
from ebbtide.types.weights import FoundWay, Manifest, Patch, PolicyVersion
from ebbtide.weight_relay.library.version_records import (
    Claim,
    Ends,
    HeldManifest,
    PatchEdge,
    StageProgress,
    VersionStage,
    dense_bytes,
    on_disk,
    step_of,
)
from ebbtide.weights import tile_sizes


class VersionIndex:
    def __init__(self) -> None:
        self._versions: dict[Stream, dict[int, HeldManifest]] = {}
        self._patches: dict[Stream, dict[Ends, PatchEdge]] = {}
        self._stages: dict[Node, VersionStage] = {}
        self._serving: Counter[bytes] = Counter()  # digest -> anchors and patches that hold it
        self._loose: set[bytes] = set()  # blobs that came or lost a user lately; every unused blob is among them
        self.on_disk: dict[bytes, int] = {}
        self.bytes = 0  # on disk, with the files of versions and patches
        self.making: set[StageProgress] = set()

    # -- committed versions --------------------------------------------------------------------------------------

    def committed(self) -> Iterator[HeldManifest]:
        for versions in self._versions.values():
            yield from versions.values()

    def streams(self) -> list[Stream]:
        return list(self._versions)

    def runs(self) -> set[str]:
        """The runs with a version here or on its way."""
        return {stream[0] for stream in self._versions} | {stage.stream[0] for stage in self._stages.values()}

    def knows(self, stream: Stream) -> bool:
        """Whether a version of the stream is here or on its way."""
        return stream in self._versions or any(stage.stream == stream for stage in self._stages.values())

    def stream(self, stream: Stream) -> dict[int, HeldManifest]:
        """All versions of a stream, with those that are only passages."""
        return self._versions.get(stream, {})

    def patches(self, stream: Stream) -> dict[Ends, PatchEdge]:
        return self._patches.get(stream, {})

    def whole(self, stream: Stream) -> dict[int, HeldManifest]:
        """The versions with a way from an anchor. Others are passages for readers that hold them already."""
        versions = self.stream(stream)
        found = whole_versions(self.anchors(stream), self.steps(stream))
        return {version: holding for version, holding in versions.items() if version in found}

    def anchors(self, stream: Stream) -> dict[int, int]:
        """The bytes of the dense tiles of each anchor."""
        return {version: dense_bytes(item.manifest) for version, item in self.stream(stream).items() if item.anchor}

    def steps(self, stream: Stream) -> list[PatchStep]:
        return [edge.step for edge in self.patches(stream).values()]

    def find(self, run_id: str, policy: str, version: int) -> HeldManifest:
        """The committed version, or the newest for 0. Raises `VersionUnavailable`."""
        stream = run_id, policy
        found = self.stream(stream).get(version) if version else None
        if not version and (whole := self.whole(stream)):
            found = whole[max(whole)]
        if found is None:
            held = ", ".join(map(str, sorted(self.whole(stream)))) or "none"
            name = f"version {version}" if version else "any version"
            raise VersionUnavailable(f"{name} of policy {policy} of run {run_id} is not here (held: {held})")
        return found

    def check_same(self, run_id: str, version: PolicyVersion) -> HeldManifest | None:
        """The committed version of that number, if any. Raises `AlreadyExists` if it has another root."""
        found = self.stream((run_id, version.policy)).get(version.version)
        if found is not None and found.manifest.version != version:
            raise AlreadyExists(f"version {version.version} of {version.policy} is committed with another root")
        return found

    def commit(self, holding: HeldManifest, edge: PatchEdge | None = None) -> None:
        """Make a staged version visible, with the patch to it."""
        self._stages.pop((holding.stream, holding.number), None)
        self._versions.setdefault(holding.stream, {})[holding.number] = holding
        self._recorded(holding)
        self._serving.update(holding.tiles.keys())
        if edge is not None:
            self.connect(edge)

    def connect(self, edge: PatchEdge) -> None:
        """Add a patch between versions held here."""
        stream = edge.patch.run_id, edge.patch.version.policy
        self._patches.setdefault(stream, {})[edge.ends] = edge
        self._recorded(edge)
        self._serving.update(edge.blobs.keys())

    def cut(self, stream: Stream, ends: Ends) -> None:
        """Remove a patch."""
        edge = self._patches[stream].pop(ends)
        self._recorded(edge, -1)
        self._release(edge.blobs)

    def evict(self, stream: Stream, version: int) -> None:
        """Remove a version and its patches."""
        for ends in [ends for ends in self.patches(stream) if version in ends]:
            self.cut(stream, ends)
        holding = self._versions[stream].pop(version)
        self._recorded(holding, -1)
        self._release(holding.tiles)
        if not self._versions[stream]:
            del self._versions[stream]
            self._patches.pop(stream, None)

    def promote(self, holding: HeldManifest) -> None:
        """Make a version an anchor: its dense tiles are all on disk."""
        holding.anchor, holding.tiles = True, tile_sizes(holding.manifest)
        self._serving.update(holding.tiles.keys())

    def thin(self, holding: HeldManifest) -> None:
        """Make an anchor a version that only patches lead to."""
        self._release(holding.tiles)
        holding.anchor, holding.tiles = False, {}

    def _recorded(self, item: HeldManifest | PatchEdge, sign: int = 1) -> None:
        self.bytes += sign * sum(map(on_disk, item.record.values()))

    def _release(self, blobs: Mapping[bytes, int]) -> None:
        self._serving.subtract(blobs.keys())
        self._loose.update(blobs)
        for digest in blobs:
            if not self._serving[digest]:
                del self._serving[digest]

    def chain(self, stream: Stream, way: FoundWay) -> list[Patch]:
        """The patches of a way. Raises `VersionUnavailable` if one is not committed."""
        patches = self.patches(stream)
        ends = list(zip((way.start, *way.via), way.via, strict=False))
        if not all(pair in patches for pair in ends):
            raise VersionUnavailable(f"the way to version {way.via[-1]} has changed; ask for it again")
        return [patches[pair].patch for pair in ends]

    # -- stages --------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[VersionStage]:
        return list(self._stages.values())

    def stage(self, stage: VersionStage) -> None:
        """Add a checked stage. It replaces a stage of the same version."""
        self._check_sizes(stage)
        self.unstage(stage)
        self._stages[(stage.stream, stage.number)] = stage

    def unstage(self, stage: VersionStage) -> None:
        if before := self._stages.pop((stage.stream, stage.number), None):
            self._loose.update(before.blobs)

    def made(self, making: StageProgress) -> None:
        """End `making`. The blobs that nothing uses by now become garbage."""
        self.making.discard(making)
        self._loose.update(making.blobs)

    def stage_of(self, stream: Stream, version: int, *, arriving: bool = False) -> VersionStage | None:
        found = self._stages.get((stream, version))
        return found if found is not None and (found.arriving or not arriving) else None

    def staged(self, run_id: str, version: PolicyVersion) -> VersionStage:
        """The stage to commit. Raises `NotReady` if there is none, or while it lacks tiles, and `InvalidRequest` if a
        tile differs from what it says: the tile came for another stage."""
        found = self.stage_of((run_id, version.policy), version.version)
        if found is None or found.manifest.version != version:
            raise NotReady(f"version {version.version} of {version.policy} is not staged here; begin its publish again")
        if lacking := sum(1 for _ in self.missing(found)):
            raise NotReady(f"version {version.version} of {version.policy} still lacks {lacking} tiles; put them first")
        self._check_sizes(found)
        if found.misfits:
            raise InvalidRequest(f"tile {min(found.misfits).hex()} is no patch of its tile", field="patch.digests")
        return found

    def _check_sizes(self, stage: VersionStage) -> None:
        for digest, size in stage.blobs.items():
            if (found := self.on_disk.get(digest, size)) != size:
                raise InvalidRequest(f"tile {digest.hex()} has {found} bytes, not {size}", field="tensors.digests")

    def missing(self, stage: VersionStage) -> Iterator[bytes]:
        return (digest for digest in stage.blobs if digest not in self.on_disk)

    def wanted(self, digest: bytes, now: float) -> set[Claim]:
        """The claims of the stages that need a blob, which keeps these alive. Raises `InvalidRequest` if none does."""
        found: set[Claim] = set()
        for stage in self._stages.values():
            if digest in stage.blobs:
                stage.used_at = now
                found.add(stage.claim(digest))
        if not found:
            raise InvalidRequest(
                f"tile {digest[:32].hex()} belongs to no staged version; begin the publish again", field="digest"
            )
        return found

    def refute(self, digest: bytes, claims: set[Claim]) -> None:
        """Record that a blob differs from what stages with these claims say."""
        for stage in self._stages.values():
            if digest in stage.blobs and stage.claim(digest) in claims:
                stage.misfits.add(digest)

    def arriving(self, digest: bytes) -> VersionStage | None:
        """A stage from upstream that needs the blob."""
        return next((stage for stage in self._stages.values() if stage.arriving and digest in stage.blobs), None)

    # -- readable: committed or arriving -------------------------------------------------------------------------

    def readable_manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """Raises `VersionUnavailable`."""
        stage = self.stage_of((run_id, policy), version, arriving=True) if version else None
        return stage.manifest if stage else self.find(run_id, policy, version).manifest

    def readable_patch(self, stream: Stream, ends: Ends) -> Patch:
        """Raises `VersionUnavailable`."""
        if edge := self.patches(stream).get(ends):
            return edge.patch
        stage = self.stage_of(stream, ends[1], arriving=True)
        if stage and stage.patch and stage.patch.base.version == ends[0]:
            return stage.patch
        raise VersionUnavailable(f"no patch from version {ends[0]} to {ends[1]} is here; ask for the way again")

    def graph(self, stream: Stream) -> tuple[dict[int, int], list[PatchStep]]:
        """Anchors and patches, the arriving ones included."""
        anchors, steps = self.anchors(stream), self.steps(stream)
        for stage in self._stages.values():
            if stage.arriving and stage.stream == stream:
                if stage.patch is None:
                    anchors[stage.number] = dense_bytes(stage.manifest)
                else:
                    steps.append(step_of(stage.patch))
        return anchors, steps

    # -- blobs ---------------------------------------------------------------------------------------------------

    def serves(self, digest: bytes) -> bool:
        return digest in self._serving

    def owners(self, digest: bytes) -> tuple[list[HeldManifest], list[PatchEdge]]:
        """The anchors and patches that hold a blob."""
        edges = [edge for patches in self._patches.values() for edge in patches.values() if digest in edge.blobs]
        return [holding for holding in self.committed() if digest in holding.tiles], edges

    def stored(self, digest: bytes, size: int) -> None:
        if digest not in self.on_disk:
            self.on_disk[digest] = size
            self.bytes += on_disk(size)
            self._loose.add(digest)

    def take_garbage(self) -> list[bytes]:
        """Forget and return the blobs that nothing holds, needs or makes."""
        users = [*(stage.blobs for stage in self._stages.values()), *(making.blobs for making in self.making)]
        garbage = [
            digest
            for digest in self._loose
            if digest not in self._serving and not any(digest in blobs for blobs in users)
        ]
        self._loose.clear()
        gone = [digest for digest in garbage if digest in self.on_disk]
        self.forget(gone)
        return gone

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest in self.on_disk:
                self.bytes -= on_disk(self.on_disk.pop(digest))
