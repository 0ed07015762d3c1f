"""Reads and writes the bytes of a tile patch: headers, kinds and limits. All numbers are little-endian and unsigned.

A *tile patch* turns one tile into that of another version. A header of 12 bytes precedes its payload:

    u8 format 1 · u8 kind · u8 bytes of a unit (1, 2, 4) · u8 zero · u32 units · u32 bytes of the payload

A unit is the unsigned integer that carries an element's bits; an element of 8 bytes is two units of 4.

    SAME    nothing
    SPARSE  u32 changes · u32 bytes of the symbols' frame · that frame · raw bits (`ebbtide.weights.patch.alphabet`)
    XOR     a frame of base ^ new
    DENSE   the new tile
    PACKED  a frame of the new tile
    SERIES  2 to 16 tile patches of the kinds SPARSE and XOR, to be applied in this order

A *frame* is a zstd frame (RFC 8878) of a single segment, with its content size, without magic number and checksum.
"""

import enum
import struct
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.dtypes import carrier

Bytes: TypeAlias = bytes | bytearray | memoryview

FORMAT: Final = 1
TILE_HEAD: Final = struct.Struct("<BBBBII")
SPARSE_HEAD: Final = struct.Struct("<II")
#: Parts of a series: patch chains seldom mix kinds that cannot be added up, and each part costs a pass.
MAX_PARTS: Final = 16


class Kind(enum.IntEnum):
    SAME = 0
    SPARSE = 1
    XOR = 2
    DENSE = 3
    PACKED = 4
    SERIES = 5


_KINDS: Final = {int(kind): kind for kind in Kind}


class TilePatch(Struct, frozen=True):
    """A tile patch with a checked header and an unchecked payload."""

    kind: Kind
    width: int
    units: int
    payload: memoryview


def unit_width(dtype: str, *, field: str = "dtype") -> int:
    """Return the bytes of the units that carry `dtype`: 1, 2 or 4. Raises `InvalidRequest` naming `field`."""
    return min(carrier(dtype, field=field).itemsize, 4)


def write_tile(kind: Kind, width: int, units: int, *payload: Bytes) -> bytes:
    """Return a tile patch: header and payload."""
    size = sum(len(part) for part in payload)
    return b"".join((TILE_HEAD.pack(FORMAT, kind, width, 0, units, size), *payload))


def read_tile(data: Bytes, width: int, units: int) -> TilePatch:
    """Check the header of a tile patch for `units` units of `width` bytes. Raises `InvalidRequest`."""
    tile, rest = _take_tile(memoryview(data), width, units)
    if len(rest):
        raise InvalidRequest(f"{len(rest)} bytes follow the tile", field="patch")
    return tile


def read_series(tile: TilePatch) -> list[TilePatch]:
    """Return the parts of a series, their headers checked. Raises `InvalidRequest`."""
    parts: list[TilePatch] = []
    rest = tile.payload
    while len(rest):
        part, rest = _take_tile(rest, tile.width, tile.units)
        if part.kind not in {Kind.SPARSE, Kind.XOR} or len(parts) == MAX_PARTS:
            raise InvalidRequest(f"a series has at most {MAX_PARTS} parts, SPARSE or XOR", field="patch")
        parts.append(part)
    if len(parts) < 2:
        raise InvalidRequest("a series has at least two parts", field="patch")
    return parts


def _take_tile(data: memoryview, width: int, units: int) -> tuple[TilePatch, memoryview]:
    if len(data) < TILE_HEAD.size:
        raise InvalidRequest("ends within the header of a tile", field="patch")
    form, kind, found_width, zero, found_units, size = TILE_HEAD.unpack_from(data)
    if form != FORMAT or zero or kind not in _KINDS:
        raise InvalidRequest(f"format {form}, kind {kind} of a tile is unknown here", field="patch")
    if (found_width, found_units) != (width, units) or units * width > TILE_BYTES:
        text = f"a tile of {found_units} units of {found_width} bytes is not one of {units} of {width}"
        raise InvalidRequest(text, field="patch")
    end = TILE_HEAD.size + size
    if end > len(data):
        raise InvalidRequest("ends within the payload of a tile", field="patch")
    return TilePatch(_KINDS[kind], width, units, data[TILE_HEAD.size : end]), data[end:]
