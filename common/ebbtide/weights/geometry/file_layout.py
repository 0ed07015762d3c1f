"""Locates a version's tiles in one safetensors file of whole tensors, whatever pieces they were published in.

The file: u64 header length, JSON header, data. Tensors lie in the order of their names, so that versions published in
other pieces or another order share the layout.
"""

import json
import math
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

from ebbtide.types.weights import Manifest, TensorEntry
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.tiles import tile_size

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
#: Data begins at a multiple of this, so that views of any dtype are aligned.
_ALIGN: Final = 64


class _Spot(Struct, frozen=True):
    """The place of an entry (a tensor or a piece) in the file."""

    at: int  # first byte of the whole tensor in the file
    contiguous: bool  # the entry's bytes follow one another
    first: int  # byte in the file of the entry's first element


class FileLayout:
    """The file of one geometry. Pure arithmetic: holds no tensor data, and can be shared."""

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
