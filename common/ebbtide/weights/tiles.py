"""Cuts a tensor's bytes into tiles of at most 1 MiB, each named by its digest (BLAKE3, 256 bits)."""

import math
from collections.abc import Iterable, Iterator

from blake3 import blake3

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.weights import TILE_BYTES, Manifest, TensorEntry
from ebbtide.weights.tensors import NamedTensor, carrier


def tile_digest(data: bytes | memoryview) -> bytes:
    """Return the digest that names a tile or another blob: 32 bytes."""
    return blake3(data).digest()


def tile_count(size: int, tile_bytes: int) -> int:
    """Return the number of tiles of `size` bytes; 0 for an empty tensor."""
    return -(-size // tile_bytes)


def tile_size(entry: TensorEntry, index: int, tile_bytes: int) -> int:
    """Return the bytes of the entry's tile `index`: `tile_bytes`, or the rest for the last tile."""
    return min(tile_bytes, entry.size - index * tile_bytes)


def slice_tiles(tensor: NamedTensor, tile_bytes: int = TILE_BYTES) -> Iterator[memoryview]:
    """Yield the tensor's tiles in order, as views."""
    for start in range(0, tensor.data.nbytes, tile_bytes):
        yield tensor.data[start : start + tile_bytes]


def tensor_size(tensor: NamedTensor) -> int:
    """Return the tensor's bytes. Raises `InvalidRequest` naming the tensor if they do not fill its shape."""
    size = carrier(tensor.dtype, field=tensor.name).itemsize * math.prod(tensor.shape)
    if size != tensor.data.nbytes:
        text = f"{tensor.data.nbytes} bytes do not fill {tensor.dtype}{list(tensor.shape)}"
        raise InvalidRequest(text, field=tensor.name)
    return size


def describe(tensor: NamedTensor, tile_bytes: int = TILE_BYTES) -> TensorEntry:
    """Return the tensor's manifest entry; reads all bytes once. Raises `InvalidRequest` if its bytes miss its shape."""
    size = tensor_size(tensor)
    return tensor_entry(tensor, size, [tile_digest(tile) for tile in slice_tiles(tensor, tile_bytes)])


def tensor_entry(tensor: NamedTensor, size: int, digests: Iterable[bytes]) -> TensorEntry:
    """Return the manifest entry of a tensor of `size` bytes whose tiles have `digests`."""
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        size=size,
        digests=tuple(digests),
        start=tensor.start,
        full=tensor.full,
    )


def check_tile(digest: bytes, data: bytes | memoryview, size: int | None = None) -> None:
    """Raise `ChunkCorrupt` unless `data` has this `digest`, and `size` bytes where that is given."""
    if size is not None and len(data) != size:
        raise ChunkCorrupt(f"tile {digest.hex()[:16]} has {len(data)} bytes, not {size}: fetch or send it again")
    if tile_digest(data) != digest:
        raise ChunkCorrupt(f"tile {digest.hex()[:16]} does not match its digest: fetch or send it again")


def tile_sizes(manifest: Manifest) -> dict[bytes, int]:
    """Return every distinct tile of a checked manifest with its size in bytes, in the order of first use."""
    sizes: dict[bytes, int] = {}
    for entry in manifest.tensors:
        for index, digest in enumerate(entry.digests):
            sizes.setdefault(digest, tile_size(entry, index, manifest.tile_bytes))
    return sizes
