"""Applies changes of a tensor that were found where the tensor lies, for example on a GPU."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array

#: For each tile: positions of its changes (in units of the tile, ascending), and their differences (unsigned units; new
#: - base modulo 2^bits). None: only the tile's new bits are known.
Found: TypeAlias = Sequence[tuple[Array, Array] | None]


def apply_found(found: Found, base: Array, into: Array, tile_bytes: int = TILE_BYTES) -> None:
    """Write the new version of `base` to `into` (flat bytes of one length), except for tiles whose changes are None."""
    for number, changes in enumerate(found):
        if changes is not None:
            tile = slice(number * tile_bytes, (number + 1) * tile_bytes)
            np.copyto(into[tile], base[tile])
            positions, differences = changes
            into[tile].view(differences.dtype)[positions] += differences
