"""Finds the tiles that hold given slices of a version's tensors, whatever pieces its publisher cut them into."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Box, Manifest, TensorEntry
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.fetch_plan import Place


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
