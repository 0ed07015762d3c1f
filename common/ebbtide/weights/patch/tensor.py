"""Patches of tensor pieces: whole tensors, or the slices of them that a rank holds; tile by tile, in bounded memory."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.layout import Bytes, PatchHead, checked_head, cut_patch, unit_width
from ebbtide.weights.patch.tile import TileCodec
from ebbtide.weights.tiles import check_tile


class Patch(Struct, frozen=True):
    """A patch cut into its tile patches. Headers are checked; what the tiles hold is not before `check_patch`."""

    head: PatchHead
    tiles: tuple[memoryview, ...]

    def codec(self) -> TileCodec:
        """A codec for this patch; one for each thread."""
        return TileCodec(self.head.width, self.head.tile_bytes)


def encode_patch(
    dtype: str, base: Bytes, new: Bytes, tile_bytes: int = TILE_BYTES, codec: TileCodec | None = None
) -> Iterator[bytes]:
    """The patch from `base` to `new`, little-endian elements of `dtype` in C order: its header, then its tile patches.

    Raises `InvalidRequest` if they are not the same whole number of elements. Holds one tile patch at a time.
    """
    width, itemsize = unit_width(dtype), carrier(dtype).itemsize
    size, given = memoryview(base).nbytes, memoryview(new).nbytes
    if size != given or size % itemsize:
        raise InvalidRequest(f"{given} bytes are not the elements of {dtype} that {size} hold", field="new")
    head = checked_head(dtype, size // itemsize, tile_bytes)
    codec = codec or TileCodec(width, tile_bytes)
    old, young = _units(base, width, "base"), _units(new, width, "new")
    yield head.to_bytes()
    for part in head.slices():
        yield codec.encode(old[part], young[part])


def read_patch(data: Bytes, dtype: str, elements: int) -> Patch:
    """The patch in `data`, which stays in use, for a piece that has `elements` of `dtype` by its manifest.

    Raises `InvalidRequest` if it is for another piece, or malformed as far as headers tell.
    """
    return Patch(*cut_patch(data, dtype, elements))


def check_patch(patch: Patch, codec: TileCodec | None = None) -> None:
    """Raise `InvalidRequest` unless every tile patch is whole and in range. Memory: the codec's, and 3 tiles."""
    codec = codec or patch.codec()
    for tile, part in zip(patch.tiles, patch.head.slices(), strict=True):
        codec.check(tile, part.stop - part.start)


def check_result(
    patch: Patch, base: Bytes, before: Sequence[bytes], after: Sequence[bytes], codec: TileCodec | None = None
) -> None:
    """Apply the patch to copies of the tiles of `base`, and compare digests: `before` and `after`, one for each tile.

    Raises `ChunkCorrupt` where a tile of the base or of the result has another digest, `InvalidRequest` if digests are
    missing, else as `check_patch` does.
    """
    codec = codec or patch.codec()
    units = _target(patch, base)
    if not len(before) == len(after) == len(patch.tiles):
        raise InvalidRequest(f"{len(before)} and {len(after)} are not {len(patch.tiles)} each", field="digests")
    for tile, part, old, new in zip(patch.tiles, patch.head.slices(), before, after, strict=True):
        check_tile(old, units[part].view(np.uint8).data)
        copy = units[part].copy()
        codec.apply(tile, copy)
        check_tile(new, copy.view(np.uint8).data)


def apply_patch(patch: Patch, into: bytearray | memoryview, codec: TileCodec | None = None) -> None:
    """Check the whole patch, then turn the base in `into` into the new version. Raises as `check_patch` does."""
    codec = codec or patch.codec()
    check_patch(patch, codec)
    install_patch(patch, into, codec)


def install_patch(patch: Patch, into: bytearray | memoryview, codec: TileCodec | None = None) -> None:
    """`apply_patch` for a patch that was checked before, so that the stop for the install is short.

    Tiles are checked again as they are decoded; if the data was changed since, those before the first broken one
    have been applied when it raises `InvalidRequest`.
    """
    codec = codec or patch.codec()
    units = _target(patch, into)
    for tile, part in zip(patch.tiles, patch.head.slices(), strict=True):
        codec.apply(tile, units[part])


def compose_patches(patches: Sequence[Patch], codec: TileCodec | None = None) -> Iterator[bytes]:
    """One patch that does what `patches` do one after another: its header, then its tile patches; no dense weights.

    Raises `InvalidRequest` if they are not for one piece in the same tiles, and as `TileCodec.compose` does.
    """
    if not patches or any(patch.head != patches[0].head for patch in patches):
        raise InvalidRequest("must be at least one, for the same elements in the same tiles", field="patches")
    head = patches[0].head
    codec = codec or patches[0].codec()
    yield head.to_bytes()
    for part, *tiles in zip(head.slices(), *(patch.tiles for patch in patches), strict=True):
        yield codec.compose(tiles, part.stop - part.start)


def _target(patch: Patch, data: Bytes) -> Array:
    if (size := memoryview(data).nbytes) != patch.head.size:
        raise InvalidRequest(f"has {size} bytes, not the {patch.head.size} of the patch", field="into")
    return _units(data, patch.head.width, "into")


def _units(data: Bytes, width: int, field: str) -> Array:
    if not memoryview(data).c_contiguous:
        raise InvalidRequest("must lie in memory without gaps", field=field)
    return np.frombuffer(data, f"<u{width}")
