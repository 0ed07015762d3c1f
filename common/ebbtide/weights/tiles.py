"""Tiles: slices of at most a MiB of a tensor's bytes, each named by its digest (BLAKE3, 256 bits)."""

from collections.abc import Iterator

from blake3 import blake3

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.weights import TILE_BYTES, Manifest, TensorEntry
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.tensors import NamedTensor


def tile_digest(data: bytes | memoryview) -> bytes:
    """The name of a tile: 32 bytes."""
    return blake3(data).digest()


def tile_count(size: int, tile_bytes: int) -> int:
    """Tiles that `size` bytes make; none for an empty tensor."""
    return -(-size // tile_bytes)


def tile_size(entry: TensorEntry, index: int, tile_bytes: int) -> int:
    """Bytes of the entry's tile `index`: `tile_bytes`, or what is left for the last."""
    return min(tile_bytes, entry.size - index * tile_bytes)


def slice_tiles(tensor: NamedTensor, tile_bytes: int = TILE_BYTES) -> Iterator[memoryview]:
    """The tensor's tiles in order, as views."""
    for start in range(0, tensor.data.nbytes, tile_bytes):
        yield tensor.data[start : start + tile_bytes]


def tensor_size(tensor: NamedTensor) -> int:
    """The tensor's bytes. Raises `InvalidRequest` naming it if they do not fill its shape."""
    size = carrier(tensor.dtype, field=tensor.name).itemsize
    for length in tensor.shape:
        size *= length
    if size != tensor.data.nbytes:
        text = f"{tensor.data.nbytes} bytes do not fill {tensor.dtype}{list(tensor.shape)}"
        raise InvalidRequest(text, field=tensor.name)
    return size


def describe(tensor: NamedTensor, tile_bytes: int = TILE_BYTES) -> TensorEntry:
    """The tensor's manifest entry. Reads all its bytes once; raises `InvalidRequest` if they do not fill its shape."""
    size = tensor_size(tensor)
    digests = tuple(tile_digest(tile) for tile in slice_tiles(tensor, tile_bytes))
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        size=size,
        digests=digests,
        start=tensor.start,
        full=tensor.full,
    )


def check_tile(digest: bytes, data: bytes | memoryview, size: int | None = None) -> None:
    """Raise `ChunkCorrupt` unless `data` is the tile called `digest` (and has `size` bytes, where that is known)."""
    if size is not None and len(data) != size:
        raise ChunkCorrupt(f"tile {digest.hex()[:16]} has {len(data)} bytes, not {size}: fetch or send it again")
    if tile_digest(data) != digest:
        raise ChunkCorrupt(f"tile {digest.hex()[:16]} does not match its digest: fetch or send it again")


def tile_sizes(manifest: Manifest) -> dict[bytes, int]:
    """Every distinct tile of a checked manifest and its bytes, in the order of first use."""
    sizes: dict[bytes, int] = {}
    for entry in manifest.tensors:
        for index, digest in enumerate(entry.digests):
            sizes.setdefault(digest, tile_size(entry, index, manifest.tile_bytes))
    return sizes
