"""Indexes what the relay holds: committed versions, the patches between them, stages of arriving versions, and blobs.

Invariant: `on_disk` names every blob file, so all tiles of keyframes and blobs of patches are in it. Every patch has
both its versions here. Only the relay's use cases write here, under the library's lock except for `stored` and `made`.
Publishers' stages live in memory alone: they die with the process, and the next start deletes their blobs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from ebbtide.errors import AlreadyExists, InvalidRequest, NotReady, VersionUnavailable
from ebbtide.types.weights import FetchPath, Manifest, Patch, PolicyVersion, VersionInfo
from ebbtide.weight_relay.retention import Node, Stream
from ebbtide.weight_relay.version_paths import PatchStep, whole_versions
from ebbtide.weights import (
    ManifestLimits,
    check_manifest,
    check_patch,
    patched_tiles,
    staged_sizes,
    tile_size,
    tile_sizes,
)
from ebbtide.weights.tensors import unit_width

#: The least bytes that a file takes on disk, and that the budget counts for it.
BLOCK: Final = 4096
#: Manifests and patches as they lie on disk.
encode: Final = msgspec.msgpack.Encoder().encode

#: A patch of a stream: its base and its version.
Ends: TypeAlias = tuple[int, int]
#: The tile that a tile patch changes: bytes of a unit, and number of units.
Units: TypeAlias = tuple[int, int]
#: A stage's claim about a blob: its bytes, and its units if it is a tile patch.
Claim: TypeAlias = tuple[int, Units | None]


def stream_of(manifest: Manifest) -> Stream:
    return manifest.run_id, manifest.version.policy


def on_disk(size: int) -> int:
    """Bytes that the budget counts for a file."""
    return max(size, BLOCK)


def _record(item: Manifest | Patch) -> dict[bytes, int]:
    """The bytes of a version's or patch's file, under a name that no digest has."""
    ends = [item.version.version] if isinstance(item, Manifest) else [item.base.version, item.version.version]
    name = "/".join(["versions", item.run_id, item.version.policy, *map(str, ends)])
    return {name.encode(): len(encode(item))}


def dense_bytes(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


class HeldManifest(Struct, kw_only=True):
    """A committed version."""

    manifest: Manifest
    keyframe: bool
    tiles: dict[bytes, int]  # bytes of its dense tiles, if it is a keyframe
    used_at: float  # when it was last published or read
    since: float  # when it came here
    record: dict[bytes, int] = {}  # bytes of its own file

    def __post_init__(self) -> None:
        self.record = _record(self.manifest)

    @property
    def stream(self) -> Stream:
        return stream_of(self.manifest)

    @property
    def number(self) -> int:
        return self.manifest.version.version

    @property
    def info(self) -> VersionInfo:
        manifest = self.manifest
        size, tensors = dense_bytes(manifest), len(manifest.tensors)
        return VersionInfo(run_id=manifest.run_id, version=manifest.version, size=size, tensors=tensors)


class PatchEdge(Struct, kw_only=True):
    """A patch whose blobs are all on disk."""

    patch: Patch
    blobs: dict[bytes, int]
    composed: bool  # by this relay
    used_at: float
    record: dict[bytes, int] = {}  # bytes of its own file

    def __post_init__(self) -> None:
        self.record = _record(self.patch)

    @property
    def ends(self) -> Ends:
        return self.patch.base.version, self.patch.version.version

    @property
    def step(self) -> PatchStep:
        return step_of(self.patch)


def step_of(patch: Patch) -> PatchStep:
    return PatchStep(patch.base.version, patch.version.version, patch.size, patch.changed, patch.elements)


class VersionStage(Struct, kw_only=True):
    """A version on its way."""

    manifest: Manifest
    patch: Patch | None  # None: it comes dense
    blobs: dict[bytes, int]  # bytes of those that it needs, in order
    units: dict[bytes, Units]  # of the blobs that are tile patches
    arriving: bool  # from upstream, and readable already; else from a publisher
    used_at: float
    record: dict[bytes, int] = {}  # bytes of the files that the version and the patch will have
    misfits: set[bytes] = set()  # blobs that came for another stage and do not fit this one

    def __post_init__(self) -> None:
        self.record = _record(self.manifest) | (_record(self.patch) if self.patch else {})

    @property
    def stream(self) -> Stream:
        return stream_of(self.manifest)

    @property
    def number(self) -> int:
        return self.manifest.version.version

    def claim(self, digest: bytes) -> Claim:
        return self.blobs[digest], self.units.get(digest)


def make_stage(
    manifest: Manifest, patch: Patch | None, limits: ManifestLimits, *, arriving: bool, now: float
) -> VersionStage:
    """Check manifest and patch, and make a stage. Raises as `check_manifest` and `check_patch`."""
    check_manifest(manifest, limits)
    units: dict[bytes, Units] = {}
    if patch is not None:
        check_patch(patch, manifest)
        units = _units(manifest, patch)
    blobs = staged_sizes(manifest, patch)
    return VersionStage(manifest=manifest, patch=patch, blobs=blobs, units=units, arriving=arriving, used_at=now)


def _units(manifest: Manifest, patch: Patch) -> dict[bytes, Units]:
    units: dict[bytes, Units] = {}
    for entry, tensor in zip(manifest.tensors, patch.tensors, strict=True):
        width = unit_width(entry.dtype, field=entry.name)
        for index, size, digest in patched_tiles(tensor):
            length = tile_size(entry, index, manifest.tile_bytes)
            if size == length:
                continue
            if length % width or units.setdefault(digest, (width, length // width)) != (width, length // width):
                raise InvalidRequest("has a tile patch that does not fit its tile", field=entry.name)
    return units


class StageProgress(Struct, eq=False):
    """Blobs that this relay makes, and the versions that must stay meanwhile."""

    stream: Stream
    versions: frozenset[int]
    blobs: dict[bytes, int]


class VersionIndex:
    def __init__(self) -> None:
        self._versions: dict[Stream, dict[int, HeldManifest]] = {}
        self._patches: dict[Stream, dict[Ends, PatchEdge]] = {}
        self._stages: dict[Node, VersionStage] = {}
        self._serving: Counter[bytes] = Counter()  # digest -> keyframes and patches that hold it
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
        """The versions with a way from a keyframe. Others are passages for readers that hold them already."""
        versions = self.stream(stream)
        found = whole_versions(self.keyframes(stream), self.steps(stream))
        return {version: holding for version, holding in versions.items() if version in found}

    def keyframes(self, stream: Stream) -> dict[int, int]:
        """The bytes of the dense tiles of each keyframe."""
        return {version: dense_bytes(item.manifest) for version, item in self.stream(stream).items() if item.keyframe}

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
        """Make a version a keyframe: its dense tiles are all on disk."""
        holding.keyframe, holding.tiles = True, tile_sizes(holding.manifest)
        self._serving.update(holding.tiles.keys())

    def thin(self, holding: HeldManifest) -> None:
        """Make a keyframe a version that only patches lead to."""
        self._release(holding.tiles)
        holding.keyframe, holding.tiles = False, {}

    def _recorded(self, item: HeldManifest | PatchEdge, sign: int = 1) -> None:
        self.bytes += sign * sum(map(on_disk, item.record.values()))

    def _release(self, blobs: Mapping[bytes, int]) -> None:
        self._serving.subtract(blobs.keys())
        self._loose.update(blobs)
        for digest in blobs:
            if not self._serving[digest]:
                del self._serving[digest]

    def chain(self, stream: Stream, way: FetchPath) -> list[Patch]:
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
        """Keyframes and patches, the arriving ones included."""
        keyframes, steps = self.keyframes(stream), self.steps(stream)
        for stage in self._stages.values():
            if stage.arriving and stage.stream == stream:
                if stage.patch is None:
                    keyframes[stage.number] = dense_bytes(stage.manifest)
                else:
                    steps.append(step_of(stage.patch))
        return keyframes, steps

    # -- blobs ---------------------------------------------------------------------------------------------------

    def serves(self, digest: bytes) -> bool:
        return digest in self._serving

    def owners(self, digest: bytes) -> tuple[list[HeldManifest], list[PatchEdge]]:
        """The keyframes and patches that hold a blob."""
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
