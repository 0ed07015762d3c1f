"""What the relay holds: committed versions, patches between them, and stages of versions that are still coming."""

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

#: What a file takes on disk at least, and what the budget counts for it.
BLOCK: Final = 4096
#: Manifests and patches as they lie on disk.
encode: Final = msgspec.msgpack.Encoder().encode

#: A patch of a stream: its base and its version.
Ends: TypeAlias = tuple[int, int]
#: What a tile patch is for: bytes of a unit, and units of its tile.
Units: TypeAlias = tuple[int, int]
#: What a stage says of a blob: its bytes, and its units if it is a tile patch.
Claim: TypeAlias = tuple[int, Units | None]


def stream_of(manifest: Manifest) -> Stream:
    return manifest.run_id, manifest.version.policy


def on_disk(size: int) -> int:
    """Bytes that the budget counts for a file."""
    return max(size, BLOCK)


def _record(item: Manifest | Patch) -> dict[bytes, int]:
    """The file of a version or patch, by a name that no digest has, and its bytes."""
    ends = [item.version.version] if isinstance(item, Manifest) else [item.base.version, item.version.version]
    name = "/".join(["versions", item.run_id, item.version.policy, *map(str, ends)])
    return {name.encode(): len(encode(item))}


def dense_bytes(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


class HeldManifest(Struct, kw_only=True):
    """A committed version. `tiles`: its dense tiles, all on disk, if it is an anchor; else none.

    `used_at` is when it was last published or read, `since` when it came here. `record`: its own file, by bytes.
    """

    manifest: Manifest
    anchor: bool
    tiles: dict[bytes, int]
    used_at: float
    since: float
    record: dict[bytes, int] = {}

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
        return VersionInfo(
            run_id=manifest.run_id,
            version=manifest.version,
            size=dense_bytes(manifest),
            tensors=len(manifest.tensors),
        )


class PatchEdge(Struct, kw_only=True):
    """A patch whose blobs are all on disk. `composed`: made here out of others. `record`: its own file, by bytes."""

    patch: Patch
    blobs: dict[bytes, int]
    composed: bool
    used_at: float
    record: dict[bytes, int] = {}

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
    """A version on its way: by its `patch`, or dense. `blobs` are those that it takes, in order, by bytes; `units`
    tells of those that are tile patches. `arriving`: from upstream, readable already; else from a publisher. `record`:
    the files that the version and the patch will have, by bytes. `misfits`: blobs that came for another stage, and are
    no such tile patches as this one says."""

    manifest: Manifest
    patch: Patch | None
    blobs: dict[bytes, int]
    units: dict[bytes, Units]
    arriving: bool
    used_at: float
    record: dict[bytes, int] = {}
    misfits: set[bytes] = set()

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
    """Check manifest and patch whole, then say what they take. Raises as `check_manifest` and `check_patch` do."""
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
    """Blobs that this relay makes, and the versions that it makes them from and for, which must stay meanwhile."""

    stream: Stream
    versions: frozenset[int]
    blobs: dict[bytes, int]
