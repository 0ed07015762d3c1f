"""Collects the elements that a pull changes, for an engine that changes its own copy in place.

Invariant: an `ElementChanges` that has not given up holds every element that differs from the mirror's before the first
tile was added, with its newest value. Threads may add at once. It dies with the process; the engine then installs from
the file.
"""

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from ebbtide.types.weights import Manifest, TensorEntry
from ebbtide.weights import Place
from ebbtide.weights.tensors import carrier

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Above this share, the changes (8 bytes of position, and the value) take as many bytes as all two-byte elements.
_SHARE: Final = 0.2


class ElementChanges:
    """Changed elements of the tensors of one geometry. Right only for an engine that holds what the mirror held."""

    def __init__(self, manifest: Manifest, *, share: float = _SHARE) -> None:
        """Gives up beyond `share` of all elements."""
        self._entries, self._tile_bytes = manifest.tensors, manifest.tile_bytes
        self._most = int(share * sum(math.prod(entry.shape) for entry in manifest.tensors))
        self._found: dict[Place, tuple[Array, Array]] = {}  # positions in the tile (uint32), values
        self._lock = threading.Lock()
        self.count = 0
        self.given_up = False

    def add(self, place: Place, old: Array, new: Array) -> None:
        """Add what differs between the bytes of a tile before and after. Neither is kept."""
        width = carrier(self._entries[place[0]].dtype).itemsize
        if self.given_up or self._tile_bytes % width:
            self._give_up()
            return
        dtype = np.dtype(f"<u{width}")
        before, after = old.view(dtype), new.view(dtype)
        positions = np.flatnonzero(before != after).astype(np.uint32)
        if known := self._found.get(place):
            positions = np.union1d(known[0], positions)
        with self._lock:
            self.count += len(positions) - (len(known[0]) if known else 0)
            if len(positions):
                self._found[place] = (positions, after[positions])
        if self.count > self._most:
            self._give_up()

    def write(self, path: Path, base_root: bytes = b"", root: bytes = b"") -> None:
        """Write a safetensors file: for each changed tensor NAME.indices (I64: flat in the whole tensor, ascending) and
        NAME.values (its dtype). Holds one tensor's changes at a time. Call it only if it has not given up. `leads`
        reads the roots of the two versions."""
        places: dict[str, list[Place]] = {}
        for place in sorted(self._found):
            places.setdefault(self._entries[place[0]].name, []).append(place)
        header: dict[str, dict[str, object]] = {"__metadata__": {"base": base_root.hex(), "root": root.hex()}}
        end = 0
        for name, parts in places.items():
            count = sum(len(self._found[place][0]) for place in parts)
            dtype = self._entries[parts[0][0]].dtype
            for part, kind, width in (("indices", "I64", 8), ("values", dtype, carrier(dtype).itemsize)):
                offsets = (end, end := end + count * width)
                header[f"{name}.{part}"] = {"dtype": kind, "shape": [count], "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for parts in places.values():
                for array in self._tensor(parts):
                    out.write(array.data)

    def _tensor(self, parts: list[Place]) -> Iterator[Array]:
        indices = np.concatenate([self._flat(place) for place in parts])
        values = np.concatenate([self._found[place][1] for place in parts])
        if parts[0][0] != parts[-1][0]:  # of several pieces, which may lie side by side
            order = np.argsort(indices)
            indices, values = indices[order], values[order]
        yield indices.view(np.uint8)
        yield values.view(np.uint8)

    def _flat(self, place: Place) -> Array:
        """The positions of a tile's changes in its whole tensor."""
        entry = self._entries[place[0]]
        first = place[1] * self._tile_bytes // carrier(entry.dtype).itemsize
        return in_tensor(entry, self._found[place][0].astype(np.int64) + first)

    def _give_up(self) -> None:
        with self._lock:
            self.given_up = True
            self._found = {}


def leads(file: int, base_root: bytes, root: bytes) -> bool:
    """Whether an open file of changes leads from one version to another, by their roots."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        told = json.loads(os.pread(file, length, 8))["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(told == {"base": base_root.hex(), "root": root.hex()})


def in_tensor(entry: TensorEntry, positions: Array) -> Array:
    """Flat positions in a piece (int64) as flat positions in its whole tensor."""
    if entry.whole:
        return positions
    total, rest = np.zeros_like(positions), positions
    stride = 1
    for start, length, full in zip(reversed(entry.start), reversed(entry.shape), reversed(entry.full), strict=True):
        rest, index = np.divmod(rest, length)
        total += (index + start) * stride
        stride *= full
    return total
