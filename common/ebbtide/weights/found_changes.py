"""What changed in a tensor as it was found where the tensor lies, on a GPU say."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array

#: For each tile: positions of its changes (units of the tile, ascending), and their differences (unsigned units; new -
#: base modulo 2^bits). None: nothing is known of this tile but its new bits.
Found: TypeAlias = Sequence[tuple[Array, Array] | None]


def apply_found(found: Found, base: Array, into: Array, tile_bytes: int = TILE_BYTES) -> None:
    """Make `into` the new version of `base` (flat bytes of one length), but for tiles of which nothing is known."""
    for number, changes in enumerate(found):
        if changes is not None:
            tile = slice(number * tile_bytes, (number + 1) * tile_bytes)
            np.copyto(into[tile], base[tile])
            positions, differences = changes
            into[tile].view(differences.dtype)[positions] += differences
