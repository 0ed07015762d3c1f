"""Checks the pieces of tensors, finds the tiles of given slices, and lays tiles out in one file of whole tensors."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Box, Manifest, TensorEntry
from ebbtide.weights.fetch_plan import Place
from ebbtide.weights.tensors import carrier
from ebbtide.weights.tiles import tile_size

#: Flat positions of the corners with sign + and of those with sign -, repeated as often as they occur.
_Corners: TypeAlias = tuple[list[int], list[int]]


def check_pieces(pieces: Sequence[TensorEntry], most: int) -> None:
    """Raise `InvalidRequest` naming the tensor if its pieces, each within it, overlap or leave something out.

    A box is determined by its signed corners, + where an even number of coordinates are ends. They are the differences,
    along all dimensions, of the function that is 1 in the box and 0 elsewhere; running sums restore it (as in summed-
    area tables: Crow, SIGGRAPH 1984). So boxes make up a tensor if and only if their signed corners add up to the
    tensor's. That takes n log n steps for n boxes in any arrangement.

    Time and memory double with each dimension along which the tensor is cut, so more than `most` are refused first.
    """
    name, full = pieces[0].name, pieces[0].full
    cut = [axis for axis, length in enumerate(full) if any(piece.shape[axis] != length for piece in pieces)]
    if len(cut) > most:
        raise InvalidRequest(f"is cut along more than {most} dimensions", field=name)
    if sum(math.prod(piece.shape) for piece in pieces) < math.prod(full):
        raise InvalidRequest(f"is not all of {list(full)} in its pieces", field=name)
    strides = _strides([full[axis] for axis in cut])
    plus, minus = _corners([0] * len(cut), [full[axis] for axis in cut], strides)
    for piece in pieces:
        more, less = _corners([piece.start[axis] for axis in cut], [piece.shape[axis] for axis in cut], strides)
        plus += less
        minus += more
    if sorted(plus) != sorted(minus):
        raise InvalidRequest("has pieces that overlap", field=name)


def _strides(lengths: Sequence[int]) -> list[int]:
    """Return strides that give each point, ends included, a flat position of its own."""
    return [math.prod(length + 1 for length in lengths[:axis]) for axis in range(len(lengths))]


def _corners(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> _Corners:
    plus, minus = [sum(map(int.__mul__, start, strides))], list[int]()
    for length, stride in zip(shape, strides, strict=True):
        step = length * stride
        plus, minus = plus + [at + step for at in minus], minus + [at + step for at in plus]
    return plus, minus


def places_of(manifest: Manifest, boxes: Mapping[str, Sequence[Box]]) -> list[Place]:
    """Return the tiles, in the manifest's order, that hold any element of `boxes`: slices of whole tensors by name.

    Time and memory depend only on the number of tiles. Raises `InvalidRequest` naming a tensor that the version does
    not have, or whose box exceeds it.
    """
    for name in boxes.keys() - {entry.name for entry in manifest.tensors}:
        raise InvalidRequest("is not a tensor of this version", field=name)
    found: list[Place] = []
    for tensor, entry in enumerate(manifest.tensors):
        hit = np.zeros(len(entry.digests), np.bool_)
        for box in boxes.get(entry.name, ()):
            _check(entry, box)
            hit |= _hit(entry, manifest.tile_bytes, box)
        found.extend((tensor, tile) for tile in np.flatnonzero(hit).tolist())
    return found


def _check(entry: TensorEntry, box: Box) -> None:
    full = entry.full_shape
    if len(box) != len(full) or any(not 0 <= a <= b <= length for (a, b), length in zip(box, full, strict=True)):
        raise InvalidRequest(f"has no slice {list(box)}: its shape is {list(full)}", field=entry.name)


def _hit(entry: TensorEntry, tile_bytes: int, box: Box) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell, for each tile of a piece, whether it holds an element of `box`, in whole or in part."""
    inside = [
        (max(a, first) - first, min(b, last) - first) for (a, b), (first, last) in zip(box, entry.box, strict=True)
    ]
    width, elements = carrier(entry.dtype).itemsize, math.prod(entry.shape)
    starts = np.arange(len(entry.digests), dtype=np.int64) * tile_bytes
    if any(a >= b for a, b in inside):
        return np.zeros(len(starts), np.bool_)
    ends = np.minimum(starts + tile_bytes, entry.size)
    before = _before(starts // width, entry.shape, inside)
    return np.asarray(_before(np.minimum(-(-ends // width), elements), entry.shape, inside) > before)


def _before(positions: Any, shape: tuple[int, ...], inside: Sequence[tuple[int, int]]) -> Any:
    """Count the elements of a box before each of the flat `positions` (int64) of an array of `shape`."""
    if not shape:
        return positions
    count = np.zeros_like(positions)
    among = np.ones(len(positions), np.bool_)  # all outer indices lie in the box, so the inner ones decide
    rest = positions
    stride, volume = math.prod(shape), math.prod(b - a for a, b in inside)
    for length, (a, b) in zip(shape, inside, strict=True):
        stride, volume = stride // length, volume // (b - a)
        index, rest = np.divmod(rest, stride)
        count += np.where(among, np.clip(index - a, 0, b - a) * volume, 0)
        among &= (a <= index) & (index < b)
    return count


Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
#: Data begins at a multiple of this, so that views of any dtype are aligned.
_ALIGN: Final = 64


class _Spot(Struct, frozen=True):
    """The place of an entry (a tensor or a piece) in the file."""

    at: int  # first byte of the whole tensor in the file
    contiguous: bool  # the entry's bytes follow one another
    first: int  # byte in the file of the entry's first element


class FileLayout:
    """Locates a version's tiles in one safetensors file of whole tensors, whatever pieces they were published in.

    The file: u64 header length, JSON header, data. Tensors lie in the order of their names, so that versions published
    in other pieces or another order share the layout. Pure arithmetic: holds no tensor data, and can be shared.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Take a checked manifest; only names, dtypes, shapes and pieces count."""
        self.tile_bytes = manifest.tile_bytes
        self.entries = manifest.tensors
        header: dict[str, dict[str, object]] = {}
        starts, end = dict[str, int](), 0  # in the data
        tensors = {entry.name: entry for entry in manifest.tensors}
        for name in sorted(tensors):
            dtype, shape = tensors[name].dtype, tensors[name].full_shape
            starts[name], end = end, end + carrier(dtype).itemsize * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (starts[name], end)}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + end
        self._spots = [self._spot(entry, len(self.header) + starts[entry.name]) for entry in manifest.tensors]

    def read(self, file: Bytes, tensor: int, tile: int) -> Bytes:
        """Return a tile's bytes from the whole file's bytes: a view if they follow one another, else a copy."""
        entry, spot = self.entries[tensor], self._spots[tensor]
        start, stop = self._range(entry, tile)
        if spot.contiguous:
            return file[spot.first + start : spot.first + stop]
        rows, skip = self._rows(file, entry, spot, start, stop)
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)[skip : skip + stop - start]

    def write(self, file: Bytes, tensor: int, tile: int, data: Bytes) -> None:
        """Write a tile's bytes to their place."""
        entry, spot = self.entries[tensor], self._spots[tensor]
        start, stop = self._range(entry, tile)
        if spot.contiguous:
            file[spot.first + start : spot.first + stop] = data
            return
        rows, skip = self._rows(file, entry, spot, start, stop)
        block = np.ascontiguousarray(rows)
        block.reshape(-1).view(np.uint8)[skip : skip + stop - start] = data
        rows[...] = block

    def together(self, tensor: int) -> bool:
        """Tell whether an entry's bytes follow one another. If not, writing a tile also rewrites, unchanged, bytes of
        neighbouring tiles."""
        return self._spots[tensor].contiguous

    def _range(self, entry: TensorEntry, tile: int) -> tuple[int, int]:
        start = tile * self.tile_bytes
        return start, start + tile_size(entry, tile, self.tile_bytes)

    def _rows(self, file: Bytes, entry: TensorEntry, spot: _Spot, start: int, stop: int) -> tuple[Any, int]:
        """Return the piece's rows (along its first dimension) that hold its bytes `start` to `stop`, and the number of
        bytes of these rows that precede `start`."""
        dtype = carrier(entry.dtype)
        whole = file[spot.at : spot.at + dtype.itemsize * math.prod(entry.full)].view(dtype).reshape(entry.full)
        piece = whole[tuple(slice(first, last) for first, last in entry.box)]
        row = dtype.itemsize * math.prod(entry.shape[1:])
        return piece[start // row : -(-stop // row)], start % row

    def _spot(self, entry: TensorEntry, at: int) -> _Spot:
        if entry.whole:
            return _Spot(at, contiguous=True, first=at)
        # Contiguous if all dimensions inside the outermost one with more than one index are whole.
        inner = next((axis for axis, length in enumerate(entry.shape) if length > 1), len(entry.shape))
        contiguous = entry.shape[inner + 1 :] == entry.full[inner + 1 :]
        offset = 0
        for first, length in zip(entry.start, entry.full, strict=True):
            offset = offset * length + first
        return _Spot(at, contiguous, at + offset * carrier(entry.dtype).itemsize)
