"""Finds the whole versions in a relay's directory at its start, and deletes everything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.scheduling.distribution.version_paths import PatchStep, passages, whole_versions
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay.library.relay_disk import (
    ANCHOR,
    COMPOSED,
    PATCHED,
    PUBLISHED,
    RelayDisk,
    StagedFile,
    blob_files,
)
from ebbtide.weight_relay.library.version_records import Ends, VersionStage, make_stage, stream_of
from ebbtide.weights import (
    ManifestLimits,
    blob_sizes,
    check_manifest,
    check_patch,
    check_tile,
    same_geometry,
    tile_sizes,
)

_MANIFEST: Final = msgspec.msgpack.Decoder(Manifest)
_PATCH: Final = msgspec.msgpack.Decoder(Patch)
_STAGED: Final = msgspec.msgpack.Decoder(StagedFile)


class RecoveryRefusal(Struct, frozen=True):
    """A file that is not whole, and why."""

    path: str
    reason: str


class RecoveredVersion(Struct):
    manifest: Manifest
    anchor: bool


class RecoveredDisk(Struct):
    """Versions with a way from an anchor, or to such a version, the patches between them, and arriving versions."""

    versions: dict[Stream, dict[int, RecoveredVersion]] = {}
    patches: dict[Stream, dict[Ends, tuple[Patch, bool]]] = {}  # and whether it was composed here
    stages: list[VersionStage] = []
    refusals: list[RecoveryRefusal] = []

    @property
    def manifests(self) -> list[Manifest]:
        return [item.manifest for versions in self.versions.values() for item in versions.values()]


def recover(disk: RelayDisk, limits: ManifestLimits | None = None) -> RecoveredDisk:
    """Find the versions. Checks sizes alone, since reads check digests; but the digests of an arrival's blobs, which
    may be unsynced. Deletes arrivals beyond `limits`: they could not be taken now."""
    return _Recovery(disk, limits or ManifestLimits()).run()


class _Recovery:
    def __init__(self, disk: RelayDisk, limits: ManifestLimits) -> None:
        self._disk, self._limits = disk, limits
        self._found = RecoveredDisk()
        self._blobs: dict[str, int] = {}

    def run(self) -> RecoveredDisk:
        for leftover in self._disk.staging.iterdir():
            leftover.unlink()
        self._blobs = blob_files(self._disk)
        for suffix in (ANCHOR, PATCHED):
            self._each(self._disk.versions, suffix, self._version)
        for suffix in (PUBLISHED, COMPOSED):
            self._each(self._disk.versions, suffix, self._patch)
        self._drop_unreachable()
        self._each(self._disk.arrivals, ".stage", self._arrival)
        used = {digest.hex() for digest in self._used()}
        for name in self._blobs.keys() - used:
            (self._disk.tiles / name).unlink()
        return self._found

    def _each(self, folder: Path, suffix: str, take: Callable[[Path], bool]) -> None:
        """Delete each file that `take` returns False for, or refuses."""
        for path in sorted(folder.glob(f"*/*/*{suffix}")):
            try:
                if take(path):
                    continue
            except (EbbtideError, msgspec.MsgspecError) as error:
                self._found.refusals.append(RecoveryRefusal(str(path.relative_to(folder)), str(error)))
            path.unlink(missing_ok=True)

    def _version(self, path: Path) -> bool:
        manifest = _MANIFEST.decode(path.read_bytes())
        check_manifest(manifest)
        stream, number = stream_of(manifest), manifest.version.version
        if self._disk.version_path(stream, number, path.suffix) != path:
            raise InvalidRequest("lies under another version's name")
        anchor = path.suffix == ANCHOR
        if anchor and (lacking := self._lacking(tile_sizes(manifest))):
            self._found.refusals.append(RecoveryRefusal(str(path.relative_to(self._disk.versions)), lacking))
            self._disk.mark(stream, number, anchor=False)  # patches may still lead to it
            anchor = False
        self._found.versions.setdefault(stream, {})[number] = RecoveredVersion(manifest, anchor)
        return True

    def _patch(self, path: Path) -> bool:
        patch = _PATCH.decode(path.read_bytes())
        stream, ends = (patch.run_id, patch.version.policy), (patch.base.version, patch.version.version)
        if self._disk.patch_path(stream, ends, path.suffix) != path:
            raise InvalidRequest("lies under another patch's name")
        versions = self._found.versions.get(stream, {})
        base, target = versions.get(ends[0]), versions.get(ends[1])
        if base is None or target is None or base.manifest.version.root != patch.base.root:
            return False  # the process died between two steps
        check_patch(patch, target.manifest)
        if not same_geometry(base.manifest, target.manifest):
            raise InvalidRequest("leads to tensors of another geometry")
        if lacking := self._lacking(blob_sizes(patch)):
            raise InvalidRequest(lacking)
        known = self._found.patches.setdefault(stream, {})
        return known.setdefault(ends, (patch, path.suffix == COMPOSED))[0] is patch

    def _arrival(self, path: Path) -> bool:
        staged = _STAGED.decode(path.read_bytes())
        stage = make_stage(staged.manifest, staged.patch, self._limits, arriving=True, now=0.0)
        if self._disk.arrival_path(stage.stream, stage.number) != path:
            raise InvalidRequest("lies under another version's name")
        if stage.number in self._found.versions.get(stage.stream, {}):
            return False
        kept = self._used()
        for digest, size in stage.blobs.items():
            found = self._blobs.get(digest.hex(), size)
            if digest in kept and found != size:
                raise InvalidRequest(f"has a tile {digest.hex()} of {size} bytes, which has {found} elsewhere")
            if digest.hex() in self._blobs and digest not in kept:
                self._verify(digest, size)
        self._found.stages.append(stage)
        return True

    def _verify(self, digest: bytes, size: int) -> None:
        try:
            check_tile(digest, self._disk.get_tile(digest), size)
        except EbbtideError:
            self._disk.drop_tiles([digest])
            del self._blobs[digest.hex()]

    def _drop_unreachable(self) -> None:
        for stream, versions in list(self._found.versions.items()):
            patches = self._found.patches.get(stream, {})
            steps = [PatchStep(*ends, 0) for ends in patches]
            whole = whole_versions([number for number, item in versions.items() if item.anchor], steps)
            stay = passages(whole, steps) if whole else set()
            for number in versions.keys() - stay:
                self._disk.drop_manifest(*stream, number)
                del versions[number]
            for ends in [ends for ends in patches if not set(ends) <= stay]:
                self._disk.drop_patch(stream, ends)
                del patches[ends]
            if not versions:
                del self._found.versions[stream]

    def _lacking(self, blobs: dict[bytes, int]) -> str:
        for digest, size in blobs.items():
            if (found := self._blobs.get(digest.hex())) != size:
                return f"its tile {digest.hex()} has {found} bytes on disk, not {size}"
        return ""

    def _used(self) -> set[bytes]:
        used: set[bytes] = set()
        for versions in self._found.versions.values():
            for item in versions.values():
                used.update(tile_sizes(item.manifest) if item.anchor else ())
        for patches in self._found.patches.values():
            for patch, _ in patches.values():
                used.update(blob_sizes(patch))
        for stage in self._found.stages:
            used.update(digest for digest in stage.blobs if digest.hex() in self._blobs)
        return used
