"""Reads the index of a static copy, which locates blobs in files that any web server or object store serves by ranges.

index              16 bytes: `EbStatic`, u32 format 1, u32 0; then 48 bytes per blob, ascending by digest:
                   32 bytes digest, u32 size, u32 file number, u64 offset, little-endian
NNNNN.blobs        the files, by number: blobs back to back
"""

import struct
from typing import Final

from ebbtide.errors import ChunkCorrupt
from ebbtide.types.weights import DIGEST_BYTES

INDEX: Final = "index"
HEAD: Final = struct.pack("<8sII", b"EbStatic", 1, 0)
#: Digest, size, file number and offset of one blob.
RECORD: Final = struct.Struct(f"<{DIGEST_BYTES}sIIQ")


def blobs_file(number: int) -> str:
    """Return the name of a file of blobs."""
    return f"{number:05d}.blobs"


def index_records(data: bytes) -> memoryview:
    """Return the records of an index. Raises `ChunkCorrupt` if it is not in this format."""
    if not data.startswith(HEAD) or (len(data) - len(HEAD)) % RECORD.size:
        raise ChunkCorrupt("is not the index of a static copy, or is broken; export the copy again")
    return memoryview(data)[len(HEAD) :]
