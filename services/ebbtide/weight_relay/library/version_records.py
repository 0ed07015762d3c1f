"""Describes what a relay holds: committed versions, the patches between them, and stages of arriving versions."""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.scheduling.distribution.version_paths import PatchStep
from ebbtide.types.weights import Manifest, Patch, VersionInfo
from ebbtide.weights import (
    ManifestLimits,
    check_manifest,
    check_patch,
    patched_tiles,
    staged_sizes,
    tile_size,
)
from ebbtide.weights.patch.tile_format import unit_width

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
    anchor: bool
    tiles: dict[bytes, int]  # bytes of its dense tiles, if it is an anchor
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
