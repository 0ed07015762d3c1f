"""Makes exact patches between tiles of two policy versions, in about as few bytes as the changes' entropy allows.

Pure functions over numpy arrays and bytes; numba compiles the kernels where it is installed, and is imported at their
first use.

A *tile patch* turns one tile into that of another version. A header of 12 bytes precedes its payload; all numbers are
little-endian and unsigned:

   u8 format 1 · u8 kind · u8 bytes of a unit (1, 2, 4) · u8 zero · u32 units · u32 bytes of the payload

A unit is the unsigned integer that carries an element's bits; an element of 8 bytes is two units of 4.

   SAME    nothing
   SPARSE  u32 changes · u32 bytes of the symbols' frame · that frame · raw bits (`Alphabet`)
   XOR     a frame of base ^ new
   DENSE   the new tile
   PACKED  a frame of the new tile
   SERIES  2 to 16 tile patches of the kinds SPARSE and XOR, to be applied in this order

A *frame* is a zstd frame (RFC 8878) of a single segment, with its content size, without magic number and checksum.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import zstandard
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES

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


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Positions (uint32) and differences (unsigned units) of changes, in arrays that can be longer.
Changes: TypeAlias = tuple[Array, Array]

#: A gap that no tile can hold; the decoder reads it for symbols that do not exist.
NO_GAP: Final = (1 << 24) - 1


class Alphabet(Struct, frozen=True):
    """The tables (int64) that map a change to a symbol and raw bits, for units of `width` bytes: 1, 2 or 4.

    A change is a gap (unchanged units since the change before it) and a difference d = new - base modulo 2^bits, taken
    as signed and folded to x = zigzag(d) - 1, so that +1, -1, +2, ... are 1, 0, 3, ... . Gap and x each fall into
    classes by bit length, as in exponential Golomb codes; a class has as many raw bits as distinguish its members. The
    *symbol* of a change, a byte, is gap class x value classes + value class. Huffman codes it as one letter: coded
    apart, classes of less than a bit (nearly all differences are +-1) would each cost a whole bit. The *raw bits* of a
    change are those of the gap below those of x; changes follow each other from bit 0 of byte 0, padded with zero bits
    to a byte.

       bits of a unit   gap classes                               value classes
       8                21: bit lengths 0 to 20                   9: bit lengths 0 to 8
       16               15: bit lengths 0 to 13, and the rest     17: bit lengths 0 to 16
       32               15: bit lengths 0 to 13, and the rest     17: bit lengths 0, 1-2, 3-4, ... 31-32
    """

    width: int
    #: 65 entries each, by leading zeros of 64 bits: the share in the symbol << 32 | number of raw bits.
    gaps: Array
    values: Array
    #: 256 entries: (least x + 1) << 40 | (least gap + 1) << 16 | raw bits of x << 8 | raw bits of the gap.
    symbols: Array
    max_bits: int  # raw bits of one change at most

    def raw_bytes(self, changes: int) -> int:
        """Return the most bytes that the raw bits of so many changes can take."""
        return -(-changes * self.max_bits // 8)


@cache
def alphabet(width: int) -> Alphabet:
    """Return the alphabet for units of `width` bytes: 1, 2 or 4."""
    gap_bits = (TILE_BYTES // width).bit_length() - 1
    gap_lengths = gap_bits if width == 1 else 13
    group = 2 if width == 4 else 1
    value_classes = -(-8 * width // group) + 1
    gaps, values = np.zeros(65, np.int64), np.zeros(65, np.int64)
    symbols = np.full(256, NO_GAP << 16, np.int64)
    members: dict[int, int] = {}
    for length in range(gap_bits + 1):
        rest = length > gap_lengths
        index = min(length, gap_lengths + 1)
        bits = gap_bits if rest else max(length - 1, 0)
        gaps[64 - length] = index * value_classes << 32 | bits
        members[index] = (1 if rest else (1 << length >> 1) + 1) << 16 | bits
    for length in range(8 * width + 1):
        index = -(-length // group)
        bits = max(length - 1, 0) if group == 1 else index * group
        values[64 - length] = index << 32 | bits
        least = 1 << length >> 1 if group == 1 else 0
        for gap, entry in members.items():
            symbols[gap * value_classes + index] = (least + 1) << 40 | bits << 8 | entry
    most = int((symbols & 255).max() + (symbols >> 8 & 255).max())
    return Alphabet(width, gaps, values, symbols, most)


_FORM: Final = zstandard.FORMAT_ZSTD1_MAGICLESS
_BARE: Final = {"format": _FORM, "write_content_size": True, "write_checksum": False, "write_dict_id": False}
#: So large that every frame is a single segment, which decodes without a window.
_WINDOW_LOG: Final = TILE_BYTES.bit_length() - 1
#: Symbols repeat only by chance: these settings search for repeats as little as zstd can and leave the work to Huffman.
_LETTERS: Final = {"window_log": _WINDOW_LOG, "hash_log": 6, "min_match": 7, "target_length": 0, "strategy": 1}
#: Units of each of the four slices in the sample that decides whether to compress a whole tile.
_SLICE: Final = 4096


class Frames:
    """Packs and unpacks zstd frames of known size, so that the memory to decode one is settled beforehand.

    For one thread at a time. Invariant: calls leave no state for later calls.
    """

    def __init__(self) -> None:
        letters = zstandard.ZstdCompressionParameters(**_BARE, **_LETTERS)
        blocks = zstandard.ZstdCompressionParameters.from_level(3, window_log=_WINDOW_LOG, **_BARE)
        samples = zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG, **_BARE)
        self._letters = zstandard.ZstdCompressor(compression_params=letters)
        self._samples = zstandard.ZstdCompressor(compression_params=samples)
        self._blocks = zstandard.ZstdCompressor(compression_params=blocks)
        self._reader = zstandard.ZstdDecompressor(max_window_size=TILE_BYTES, format=_FORM)

    def pack_symbols(self, symbols: Array) -> bytes:
        return self._letters.compress(symbols.data)

    def pack_below(self, block: Callable[[slice], Array], units: int, below: int) -> bytes | None:
        """Return the frame of a block of units if it has fewer than `below` bytes, else None; mostly by a sample."""
        if units > 8 * _SLICE:
            starts = range(0, units - _SLICE + 1, (units - _SLICE) // 3)
            sample = np.concatenate([block(slice(start, start + _SLICE)) for start in starts])
            if len(self._samples.compress(sample.view(np.uint8).data)) * units > 1.2 * below * len(sample):
                return None
        frame = self.pack(block(slice(None)))
        return frame if len(frame) < below else None

    def pack(self, block: Array) -> bytes:
        return self._blocks.compress(block.view(np.uint8).data)

    def unpack(self, frame: Bytes, size: int) -> bytes:
        """Return the `size` bytes, at most a tile, of a frame, and allocate nothing else.

        Raises `InvalidRequest` for frames of another size, with options that we never write, or with trailing data.
        """
        header = _header(size)
        if frame[: len(header)] != header:  # zstd would allocate the size that the frame states
            raise InvalidRequest(f"has a frame that is not of {size} bytes", field="patch")
        try:
            found = self._reader.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"has a frame that cannot be read ({error})", field="patch") from None
        if len(found) != size:
            raise InvalidRequest(f"has a frame of {len(found)} bytes, not {size}", field="patch")
        return found


def _header(size: int) -> bytes:
    """Return the only header that we write for a frame of `size` bytes: a single segment (RFC 8878, 3.1.1.1)."""
    if size < 256:
        return struct.pack("<BB", 0x20, size)
    return struct.pack("<BH", 0x60, size - 256) if size < 65536 + 256 else struct.pack("<BI", 0xA0, size)


#: If fewer than one unit in so many changes, XOR and PACKED can only win if the changes are regular.
_CROWDED: Final = 16


class TileCodec:
    """Handles patches of tiles of up to `tile_bytes`, for one thread at a time; each thread has its own codec.

    Invariant: a tile patch is applied to a target whole or not at all. Only the memory of the scratch stays between
    calls: at most 6 times `tile_bytes` (10 for units of one byte), and about 2 MiB of zstd's. No call allocates more
    than 3 times `tile_bytes` besides, whatever a patch says; but numpy's kernels, used instead of numba's if `compiled`
    is False, need 144 bytes for every unit that changes.
    """

    def __init__(self, width: int, tile_bytes: int = TILE_BYTES, *, compiled: bool | None = None) -> None:
        if width not in {1, 2, 4} or not 1 <= tile_bytes <= TILE_BYTES:
            raise InvalidRequest(f"units have 1, 2 or 4 bytes, and tiles at most {TILE_BYTES}", field="width")
        self._kernels = _kernels(compiled)
        self._letters = alphabet(width)
        self._dtype = np.dtype(f"<u{width}")
        self._frames = Frames()
        self._units = units = tile_bytes // width
        self._positions = np.empty(units, np.uint32)
        self._differences = np.empty(units, self._dtype)
        self._symbols = np.empty(units, np.uint8)
        self._raw = np.empty(self._letters.raw_bytes(units) + 8, np.uint8)
        self._raw_view = self._raw.data  # made once: a tile costs microseconds

    def encode(self, base: Array, new: Array) -> bytes:
        """Return the smallest tile patch from `base` to `new`: flat contiguous unsigned units, of one length."""
        self._check_units(base, "base")
        self._check_units(new, "new")
        if len(base) != len(new):
            raise InvalidRequest(f"has {len(new)} units where its base has {len(base)}", field="new")
        changes, payload = self._sparse(base, new)
        if not changes:
            return self._write(Kind.SAME, len(new))
        kind, size = Kind.SPARSE, sum(len(part) for part in payload)
        if changes * _CROWDED > len(new) or _regular(changes, payload):
            blocks = ((Kind.XOR, lambda part: base[part] ^ new[part]), (Kind.PACKED, lambda part: new[part]))
            for other, block in blocks:
                if (frame := self._frames.pack_below(block, len(new), size)) is not None:
                    kind, payload, size = other, [frame], len(frame)
        if size >= new.nbytes:
            kind, payload = Kind.DENSE, [new.tobytes()]
        return self._write(kind, len(new), *payload)

    def check(self, patch: Bytes, units: int) -> None:
        """Raise `InvalidRequest` unless `patch` is whole and made for a tile of `units` units."""
        for part in self._parts(patch, units):
            self._check(part)

    def apply(self, patch: Bytes, into: Array) -> None:
        """Turn the base in `into` (flat contiguous unsigned units) into the new tile, in place.

        Raises `InvalidRequest`, with `into` unchanged, unless the patch is whole and made for such a tile. Only digests
        show whether `into` is the right base.
        """
        self._check_units(into, "into")
        if not into.flags.writeable:
            raise InvalidRequest("cannot be written", field="into")
        parts = self._parts(patch, len(into))
        if len(parts) > 1:
            self.check(patch, len(into))
        for part in parts:
            self._add(into, part)

    def encode_changes(self, positions: Array, differences: Array, units: int) -> bytes | None:
        """Return the SPARSE (or SAME) tile patch of changes found elsewhere, for example on a GPU.

        `positions` are ascending integers, `differences` units: new - base modulo 2^bits, with or without those of 0.
        None if the changes are so regular, or so many, that another kind is probably smaller: `encode` the tile then.
        """
        self._check_units(differences, "differences")
        bounds = len(positions) and (
            positions[0] < 0 or positions[-1] >= units or not np.all(positions[:-1] < positions[1:])
        )
        if positions.shape != differences.shape or units > self._units or bounds:
            raise InvalidRequest(f"must ascend within {units} units, one for each difference", field="positions")
        changes, payload = self._payload(self._kernels.code_changes, positions, differences)
        if not changes:
            return self._write(Kind.SAME, units)
        if _regular(changes, payload) or 2 * sum(map(len, payload)) > units * self._dtype.itemsize:
            return None
        return self._write(Kind.SPARSE, units, *payload)

    def compose(self, patches: Sequence[Bytes], units: int) -> bytes:
        """Return one tile patch with the effect of `patches` in order, without the changes that they undo.

        Differences add up modulo 2^bits, XORs combine by XOR, and a dense tile replaces everything before it; adjacent
        XOR and SPARSE patches stay side by side in a series. Raises `InvalidRequest` as `check` does, and for a series
        of more than 16 parts: take a keyframe then.
        """
        for patch in patches:
            self.check(patch, units)
        parts = [part for patch in patches for part in self._parts(patch, units)]
        last = max((index for index, part in enumerate(parts) if part.kind in {Kind.DENSE, Kind.PACKED}), default=None)
        if last is not None:
            return self._write_dense(self._total(parts[last:], units))
        joined = [self._join(kind, list(group), units) for kind, group in groupby(parts, key=lambda part: part.kind)]
        joined = [patch for patch in joined if read_tile(patch, self._dtype.itemsize, units).kind != Kind.SAME]
        if len(joined) > MAX_PARTS:
            raise InvalidRequest(f"would be a series of {len(joined)} parts: take a keyframe", field="patches")
        if len(joined) > 1:
            return self._write(Kind.SERIES, units, *joined)
        return joined[0] if joined else self._write(Kind.SAME, units)

    def _join(self, kind: Kind, parts: Sequence[TilePatch], units: int) -> bytes:
        if len(parts) == 1:
            return self._write(kind, units, parts[0].payload)
        total = self._total(parts, units)
        if not total.any():
            return self._write(Kind.SAME, units)
        if kind == Kind.SPARSE:
            return self._write(kind, units, *self._sparse(np.zeros_like(total), total)[1])
        return self._write(kind, units, self._frames.pack(total))

    def _total(self, parts: Sequence[TilePatch], units: int) -> Array:
        total = np.zeros(units, self._dtype)
        for part in parts:
            self._add(total, part)
        return total

    def _sparse(self, base: Array, new: Array) -> tuple[int, list[Bytes]]:
        return self._payload(self._kernels.code, base, new)

    def _payload(self, code: Callable[..., tuple[int, int]], *units: Array) -> tuple[int, list[Bytes]]:
        """Return the number of changes, and the payload of kind SPARSE: its head, its symbols' frame, its raw bits."""
        count, bits = code(*units, self._letters, self._symbols, self._raw)
        frame = self._frames.pack_symbols(self._symbols[:count])
        return count, [SPARSE_HEAD.pack(count, len(frame)), frame, self._raw_view[: (bits + 7) >> 3]]

    def _write_dense(self, new: Array) -> bytes:
        frame = self._frames.pack_below(lambda part: new[part], len(new), new.nbytes)
        return self._write(Kind.DENSE if frame is None else Kind.PACKED, len(new), frame or new.tobytes())

    def _write(self, kind: Kind, units: int, *payload: Bytes) -> bytes:
        return write_tile(kind, self._dtype.itemsize, units, *payload)

    def _parts(self, patch: Bytes, units: int) -> list[TilePatch]:
        """Return a series' parts, nothing for SAME, or the patch itself for other kinds. Headers are checked."""
        if units > self._units:
            raise InvalidRequest(f"has {units} units, more than {self._units}", field="tile")
        tile = read_tile(patch, self._dtype.itemsize, units)
        if tile.kind == Kind.SAME and len(tile.payload):
            raise InvalidRequest("has kind SAME, but also a payload", field="patch")
        if tile.kind == Kind.SERIES:
            return read_series(tile)
        return [] if tile.kind == Kind.SAME else [tile]

    def _add(self, into: Array, part: TilePatch) -> None:
        if part.kind == Kind.SPARSE:
            self._run(self._kernels.apply, part, into)
        elif part.kind == Kind.XOR:
            np.bitwise_xor(into, self._block(part), out=into)
        else:
            into[:] = self._block(part)

    def _check(self, part: TilePatch) -> None:
        if part.kind == Kind.SPARSE:
            self._run(self._kernels.decode, part, part.units)
        else:
            self._block(part)

    def _block(self, part: TilePatch) -> Array:
        size = part.units * part.width
        if part.kind == Kind.DENSE and len(part.payload) != size:
            raise InvalidRequest(f"has {len(part.payload)} bytes of {size}", field="patch")
        block = part.payload if part.kind == Kind.DENSE else self._frames.unpack(part.payload, size)
        return np.frombuffer(block, self._dtype)

    def _run(self, kernel: Callable[..., bool], part: TilePatch, target: Array | int) -> None:
        symbols, raw, limit = self._read_sparse(part)
        if not kernel(symbols, raw, limit, self._letters, target, (self._positions, self._differences)):
            raise InvalidRequest("has changes out of range, or not as many as it says", field="patch")

    def _read_sparse(self, part: TilePatch) -> tuple[Array, Array, int]:
        """Return the symbols, the raw bits (in the scratch, which has room for any symbols' bits), and their number."""
        payload, head = part.payload, SPARSE_HEAD.size
        if len(payload) < head:
            raise InvalidRequest("ends within the head of its changes", field="patch")
        count, size = SPARSE_HEAD.unpack_from(payload)
        length = len(payload) - head - size
        if not 1 <= count <= min(part.units, self._units) or not 0 <= length <= self._letters.raw_bytes(count):
            raise InvalidRequest(f"{count} changes do not fit their bytes or their tile", field="patch")
        symbols = np.frombuffer(self._frames.unpack(payload[head : head + size], count), np.uint8)
        self._raw_view[:length] = payload[head + size :]
        return symbols, self._raw, 8 * length

    def _check_units(self, units: Array, field: str) -> None:
        if units.dtype != self._dtype or units.ndim != 1 or not units.flags.c_contiguous or len(units) > self._units:
            text = f"must be at most {self._units} units of {self._dtype.itemsize} bytes, flat and contiguous"
            raise InvalidRequest(text, field=field)


def _regular(changes: int, payload: Sequence[Bytes]) -> bool:
    """Tell whether the symbols' frame has less than 2 bits a change; random changes need more."""
    return len(payload[1]) * 4 < changes


def warm_up() -> None:
    """Compile or load the kernels for all widths. The first time on a host takes seconds: call it in a thread."""
    for width in (1, 2, 4):
        codec, base = TileCodec(width), np.zeros(64, f"<u{width}")
        codec.apply(codec.encode(base, base + np.array(1, base.dtype)), base)
        codec.encode_changes(np.zeros(1, np.uint32), base[:1], len(base))


def _kernels(compiled: bool | None) -> ModuleType:
    """Import numba's kernels or numpy's, which give the same bytes. Late, because importing numba takes a second."""
    if compiled is None:
        compiled = find_spec("numba") is not None
    return import_module(f"ebbtide.weights.{'compiled' if compiled else 'numpy'}_kernels")
