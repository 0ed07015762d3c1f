"""Writes a static copy of versions: files that any web server or object store serves by ranges.

    index, NNNNN.blobs  the blobs, as in `ebbtide.weights.manifest.static_index`; patches' blobs before dense tiles
    version-N.msgpack   the manifest of version N, and the patches to it
    versions.msgpack    the list of versions

Invariant: the files that `index` names never change. A further version adds files, then replaces the index at once.
A writer that dies leaves files that nothing names. The copy needs no trust: manifests are signed, and readers check
each blob by its digest.
"""

import os
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.runtime import fsync
from ebbtide.types.weights import Manifest, Patch, VersionInfo
from ebbtide.weights import blob_sizes, check_tile, tile_sizes
from ebbtide.weights.manifest.static_index import HEAD, INDEX, RECORD, blobs_file, index_records

VERSIONS: Final = "versions.msgpack"
#: Large enough that a policy of any size takes few files, small enough to upload one again after a failure.
FILE_BYTES: Final = 1 << 30


def file_of(version: int) -> str:
    """The name of a version's file."""
    return f"version-{version}.msgpack"


class StaticVersion(Struct, frozen=True, kw_only=True):
    """The content of `version-N.msgpack`."""

    manifest: Manifest
    patches: tuple[Patch, ...] = ()
    dense: bool = True  # whether all its dense tiles are there, not only those of the patches

    @property
    def blobs(self) -> dict[bytes, int]:
        """Every blob that it needs and its bytes, in order."""
        sizes: dict[bytes, int] = {}
        for patch in self.patches:
            sizes |= blob_sizes(patch)
        return sizes | tile_sizes(self.manifest) if self.dense else sizes


class StaticCopyWriter:
    """Adds a version to the copy in `folder`, and makes the folder. Raises `InvalidRequest` if it cannot be written."""

    def __init__(self, version: StaticVersion, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._version, self._sizes = version, version.blobs
        self._folder, self._file_bytes = folder, file_bytes
        self._out: BinaryIO | None = None
        self._offset = 0
        self.written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = _read_index(folder)
            self._number = max((int(path.stem) for path in folder.glob("?????.blobs")), default=-1)
        except (OSError, ValueError, ChunkCorrupt) as error:
            raise _unwritable(folder, error) from None

    @property
    def missing(self) -> list[bytes]:
        """The version's blobs that are not in the copy yet, in order."""
        return [digest for digest in self._sizes if digest not in self._records]

    def add(self, digest: bytes, data: bytes) -> None:
        """Write the next blob. Raises `ChunkCorrupt` for one that does not match its digest."""
        check_tile(digest, data, self._sizes[digest])
        try:
            if self._out is None or self._offset + len(data) > self._file_bytes:
                self.close()
                self._number, self._offset = self._number + 1, 0
                self._out = (self._folder / blobs_file(self._number)).open("xb")
            self._out.write(data)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        self._records[digest] = (len(data), self._number, self._offset)
        self._offset += len(data)
        self.written += len(data)

    def finish(self) -> None:
        """Publish the version in the copy. Raises `InvalidRequest` while blobs are missing."""
        if missing := self.missing:
            raise InvalidRequest(f"{len(missing)} blobs are missing", field="version")
        records = sorted((digest, *spot) for digest, spot in self._records.items())
        manifest = self._version.manifest
        try:
            self.close()
            self._replace(file_of(manifest.version.version), msgspec.msgpack.encode(self._version))
            self._replace(INDEX, HEAD + b"".join(RECORD.pack(*record) for record in records))
            self._replace(VERSIONS, msgspec.msgpack.encode(_listed(self._folder, manifest)))
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def close(self) -> None:
        """Close the file being written."""
        if self._out is not None:
            out, self._out = self._out, None
            out.flush()
            os.fsync(out.fileno())
            out.close()

    def _replace(self, name: str, data: bytes) -> None:
        staged = self._folder / f".{name}.{os.getpid()}"
        staged.write_bytes(data)
        fsync(staged)
        staged.replace(self._folder / name)
        fsync(self._folder)


def _read_index(folder: Path) -> dict[bytes, tuple[int, int, int]]:
    """Size, file and offset of each blob in the copy. Raises `ChunkCorrupt` for a malformed index."""
    if not (folder / INDEX).exists():
        return {}
    records = index_records((folder / INDEX).read_bytes())
    return {digest: (size, file, at) for digest, size, file, at in RECORD.iter_unpack(records)}


def _listed(folder: Path, manifest: Manifest) -> list[VersionInfo]:
    """The list of versions, with this one."""
    path = folder / VERSIONS
    before = msgspec.msgpack.decode(path.read_bytes(), type=list[VersionInfo]) if path.exists() else []
    size, tensors = sum(entry.size for entry in manifest.tensors), len(manifest.tensors)
    info = VersionInfo(run_id=manifest.run_id, version=manifest.version, size=size, tensors=tensors)
    return [*(other for other in before if other.version.version != info.version.version), info]


def _unwritable(folder: Path, error: Exception) -> InvalidRequest:
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InvalidRequest(f"{folder} cannot be written ({text}); name another, or remove it", field="folder")
