"""Reads and writes the relay's directory, and finds the whole versions in it at a start.

    tiles/<digest>                                  one blob (dense tile or tile patch), named by its digest
    versions/<run>/<policy>/<version>.manifest      a keyframe: all of its dense tiles are here
    versions/<run>/<policy>/<version>.patched       another version, to which patches lead
    versions/<run>/<policy>/<base>-<version>.patch  a patch that was published, or .composed: made here
    arriving/<run>/<policy>/<version>.stage         a version from upstream, whose blobs may still be missing
    keys/<run>                                      the publisher's public key, in hex
    staging/                                        files being written
    format                                          the number of this layout and of its records; 1 if there is none

Invariant: each file outside `tiles/` appears by one rename, after the fsync of all that it needs: a keyframe's manifest
needs its dense tiles, a patch its blobs, any other version its patch. They are deleted in the opposite order. So what a
dead process leaves is whole, or nothing whole needs it; `recover` deletes the latter. A directory of another
format is refused before it is read. One process owns the directory at a time (a file lock, which the system releases
when the process dies). All calls block; the service makes them from threads.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, Unavailable
from ebbtide.runtime import fsync, write_atomically
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay.library.version_index import Ends, VersionStage, encode, make_stage, stream_of
from ebbtide.weight_relay.retention import Stream
from ebbtide.weight_relay.version_paths import PatchStep, passages, whole_versions
from ebbtide.weights import (
    ManifestLimits,
    blob_sizes,
    check_manifest,
    check_patch,
    check_tile,
    same_geometry,
    tile_sizes,
)

KEYFRAME: Final = ".manifest"
PATCHED: Final = ".patched"
PUBLISHED: Final = ".patch"
COMPOSED: Final = ".composed"
#: Raised when the meaning of a file changes, so that a relay of another release deletes nothing.
FORMAT: Final = 1
#: Syncs at once: file systems write several to the disk together.
_SYNCS: Final = 16


class StagedFile(Struct, frozen=True):
    """The content of an arriving version's file."""

    manifest: Manifest
    patch: Patch | None


_MANIFEST: Final = msgspec.msgpack.Decoder(Manifest)
_PATCH: Final = msgspec.msgpack.Decoder(Patch)
_STAGED: Final = msgspec.msgpack.Decoder(StagedFile)


class RelayDisk:
    def __init__(self, root: Path) -> None:
        """Take the directory. Raises `InvalidRequest` if another relay has it, or it cannot be written."""
        self.tiles, self.versions, self.staging = root / "tiles", root / "versions", root / "staging"
        self.arrivals, self._keys = root / "arriving", root / "keys"
        try:
            root.mkdir(parents=True, exist_ok=True)
            _agree_on_format(root / "format")
            for folder in (self.tiles, self.versions, self.staging, self.arrivals, self._keys):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (root / "lock").open("wb")
        except OSError as error:
            text = f"{root} cannot be written ({error.strerror}); name another directory"
            raise InvalidRequest(text, field="data_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidRequest(
                f"{root} is in use by another weight-relay; give this one its own", field="data_dir"
            ) from None

    def close(self) -> None:
        self._lock.close()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def put_tile(self, digest: bytes, data: bytes) -> None:
        """Write a verified blob. It is durable after `sync_tiles`."""
        staged = self.staging / secrets.token_hex(8)
        staged.write_bytes(data)
        staged.rename(self.tiles / digest.hex())

    def get_tile(self, digest: bytes) -> bytes:
        """Read a blob without verifying it. Raises `OSError`."""
        return (self.tiles / digest.hex()).read_bytes()

    def sync_tiles(self, digests: Iterable[bytes]) -> None:
        """Make blobs durable. Passes over dropped ones: no version can need them."""
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(self._sync_tile, digests))
        fsync(self.tiles)

    def _sync_tile(self, digest: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            fsync(self.tiles / digest.hex())

    def drop_tiles(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            (self.tiles / digest.hex()).unlink(missing_ok=True)

    # -- versions and patches ------------------------------------------------------------------------------------

    def put_manifest(self, manifest: Manifest, *, keyframe: bool = True) -> None:
        """Record a version, durably; all that it needs must be durable already."""
        path = self.version_path(stream_of(manifest), manifest.version.version, KEYFRAME if keyframe else PATCHED)
        self._put(path, encode(manifest), self.versions)

    def put_patch(self, patch: Patch, *, composed: bool = False) -> None:
        """Record a patch, durably; its blobs must have been synced."""
        ends = patch.base.version, patch.version.version
        stream = patch.run_id, patch.version.policy
        path = self.patch_path(stream, ends, COMPOSED if composed else PUBLISHED)
        self._put(path, encode(patch), self.versions)

    def mark(self, stream: Stream, version: int, *, keyframe: bool) -> None:
        """Record, durably, whether a version is a keyframe. Idempotent."""
        now, then = (PATCHED, KEYFRAME) if keyframe else (KEYFRAME, PATCHED)
        path = self.version_path(stream, version, now)
        with contextlib.suppress(FileNotFoundError):  # renamed before, and not synced
            path.rename(path.with_suffix(then))
        fsync(path.parent)

    def drop_manifest(self, run_id: str, policy: str, version: int) -> None:
        """Forget a version, durably, before its patches and tiles go."""
        for suffix in (KEYFRAME, PATCHED):
            self._drop(self.version_path((run_id, policy), version, suffix))

    def drop_patch(self, stream: Stream, ends: Ends) -> None:
        """Forget a patch, durably, before its blobs go."""
        for suffix in (PUBLISHED, COMPOSED):
            self._drop(self.patch_path(stream, ends, suffix))

    def version_path(self, stream: Stream, version: int, suffix: str) -> Path:
        return self.versions / stream[0] / stream[1] / f"{version:010d}{suffix}"

    def patch_path(self, stream: Stream, ends: Ends, suffix: str) -> Path:
        return self.versions / stream[0] / stream[1] / f"{ends[0]:010d}-{ends[1]:010d}{suffix}"

    # -- arrivals and keys ---------------------------------------------------------------------------------------

    def put_arrival(self, manifest: Manifest, patch: Patch | None) -> None:
        """Record an arriving version, durably."""
        path = self.arrival_path(stream_of(manifest), manifest.version.version)
        self._put(path, encode(StagedFile(manifest, patch)), self.arrivals)

    def drop_arrival(self, stream: Stream, version: int) -> None:
        self._drop(self.arrival_path(stream, version))

    def arrival_path(self, stream: Stream, version: int) -> Path:
        return self.arrivals / stream[0] / stream[1] / f"{version:010d}.stage"

    def put_key(self, run_id: str, key: bytes) -> None:
        """Pin a run's publisher, durably."""
        self._put(self._keys / run_id, key.hex().encode(), self._keys)

    def drop_key(self, run_id: str) -> None:
        (self._keys / run_id).unlink(missing_ok=True)

    def keys(self) -> dict[str, str]:
        """The texts of the pinned keys, by run. Raises `InvalidRequest` for a file that cannot be read."""
        found = {}
        for path in self._keys.iterdir():
            try:
                found[path.name] = path.read_text(errors="replace")
            except OSError as error:
                text = f"keys/{path.name} is no readable file ({error.strerror}); remove it, or put the run's key back"
                raise InvalidRequest(text, field="data_dir") from None
        return found

    # -- files ---------------------------------------------------------------------------------------------------

    def _put(self, path: Path, data: bytes, top: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.staging / secrets.token_hex(8)
        staged.write_bytes(data)
        fsync(staged)
        staged.rename(path)
        for folder in path.parents:
            fsync(folder)
            if folder == top:
                break

    def _drop(self, path: Path) -> None:
        if not path.exists():
            return
        path.unlink()
        fsync(path.parent)
        for folder in (path.parent, path.parent.parent):
            if not any(folder.iterdir()):
                folder.rmdir()


def _agree_on_format(path: Path) -> None:
    """Write the format into a directory without one. Raises `InvalidRequest` for another format."""
    if not path.exists():
        write_atomically(path, f"{FORMAT}\n")
        fsync(path)
        fsync(path.parent)
    found = path.read_text(errors="replace").strip()
    if found != str(FORMAT):
        raise InvalidRequest(
            f"{path.parent} has format {found[:20]!r}, and this relay knows {FORMAT} alone: start one of the "
            "release that wrote it, or name another directory",
            field="data_dir",
        )


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of the disk into `NoCapacity` or `Unavailable`. A missing file is left to the caller."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoCapacity(
                "the relay's disk is full; free space or lower --budget-bytes", retry_after_s=10.0
            ) from None
        raise Unavailable(f"the relay's disk fails ({error.strerror}); see its log") from error


def blob_files(disk: RelayDisk) -> dict[str, int]:
    """Names and bytes of the blobs on disk."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(disk.tiles)}


class RecoveryRefusal(Struct, frozen=True):
    """A file that is not whole, and why."""

    path: str
    reason: str


class RecoveredVersion(Struct):
    manifest: Manifest
    keyframe: bool


class RecoveredDisk(Struct):
    """Versions with a way from a keyframe, or to such a version, the patches between them, and arriving versions."""

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
        for suffix in (KEYFRAME, PATCHED):
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
        keyframe = path.suffix == KEYFRAME
        if keyframe and (lacking := self._lacking(tile_sizes(manifest))):
            self._found.refusals.append(RecoveryRefusal(str(path.relative_to(self._disk.versions)), lacking))
            self._disk.mark(stream, number, keyframe=False)  # patches may still lead to it
            keyframe = False
        self._found.versions.setdefault(stream, {})[number] = RecoveredVersion(manifest, keyframe)
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
            whole = whole_versions([number for number, item in versions.items() if item.keyframe], steps)
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
                used.update(tile_sizes(item.manifest) if item.keyframe else ())
        for patches in self._found.patches.values():
            for patch, _ in patches.values():
                used.update(blob_sizes(patch))
        for stage in self._found.stages:
            used.update(digest for digest in stage.blobs if digest.hex() in self._blobs)
        return used
