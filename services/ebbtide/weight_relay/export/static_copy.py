"""A static copy of a version: files that any web server or object store serves by ranges.

    index            16 bytes: `EbStatic`, format 1, 0; then 48 bytes per blob, sorted by digest:
                     digest, size (u32), file number (u32), offset (u64), little-endian
    00000.blobs ...  blobs one after another: a patch's before the dense tiles, each in the manifest's order
    version.msgpack  the manifest, and the patches to it

Nothing in it needs trust: the manifest is signed, and whoever fetches checks each blob by its digest. The index comes
last and at once, so that a copy whose writer died is no copy yet.
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights import blob_sizes, check_tile, tile_sizes

MAGIC: Final = struct.pack("<8sII", b"EbStatic", 1, 0)
RECORD: Final = struct.Struct("<32sIIQ")
#: Large enough that few files serve a policy of any size, small enough to be uploaded again after a break.
FILE_BYTES: Final = 1 << 30


class StaticVersion(Struct, frozen=True, kw_only=True):
    """`version.msgpack`: what a copy is of. `dense`: all its dense tiles are there, not only those of the patches."""

    manifest: Manifest
    patches: tuple[Patch, ...] = ()
    dense: bool = True

    @property
    def blobs(self) -> dict[bytes, int]:
        """Every blob of the copy and its bytes, in the order in which they lie there."""
        sizes: dict[bytes, int] = {}
        for patch in self.patches:
            sizes |= blob_sizes(patch)
        return sizes | tile_sizes(self.manifest) if self.dense else sizes


class Writer:
    """Writes a copy into `folder`, which it makes. Blobs come in order; `finish` makes it a copy.

    Raises `InvalidRequest` for a folder that cannot be written or holds a copy already.
    """

    def __init__(self, version: StaticVersion, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._version, self._sizes = version, version.blobs
        self._folder, self._file_bytes = folder, file_bytes
        self._records: list[tuple[bytes, int, int, int]] = []
        self._out: BinaryIO | None = None
        self._number, self._offset = -1, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
        if (folder / "index").exists():
            raise InvalidRequest(f"{folder} holds a static copy already; name another", field="folder")

    @property
    def written(self) -> int:
        """Bytes of the blobs written so far."""
        return sum(size for _, size, _, _ in self._records)

    def add(self, digest: bytes, data: bytes) -> None:
        """Write the next blob. Raises `ChunkCorrupt` for one that is not what its digest says."""
        check_tile(digest, data, self._sizes[digest])
        try:
            if self._out is None or self._offset + len(data) > self._file_bytes:
                self.close()
                self._number, self._offset = self._number + 1, 0
                self._out = (self._folder / f"{self._number:05d}.blobs").open("wb")
            self._out.write(data)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        self._records.append((digest, len(data), self._number, self._offset))
        self._offset += len(data)

    def finish(self) -> None:
        """All blobs have come. Raises `InvalidRequest` if not."""
        if len(self._records) != len(self._sizes):
            raise InvalidRequest(f"{len(self._sizes) - len(self._records)} blobs are missing", field="version")
        try:
            self.close()
            (self._folder / "version.msgpack").write_bytes(msgspec.msgpack.encode(self._version))
            staged = self._folder / ".index"
            staged.write_bytes(MAGIC + b"".join(RECORD.pack(*record) for record in sorted(self._records)))
            staged.rename(self._folder / "index")
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def close(self) -> None:
        """End the file being written."""
        if self._out is not None:
            out, self._out = self._out, None
            out.flush()
            os.fsync(out.fileno())
            out.close()


def _unwritable(folder: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{folder} cannot be written ({error.strerror})", field="folder")
