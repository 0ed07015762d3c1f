"""Maps a change to a symbol and raw bits.

A change is a gap (unchanged units since the change before it) and a difference d = new - base modulo 2^bits, taken
as signed and folded to x = zigzag(d) - 1, so that +1, -1, +2, ... are 1, 0, 3, ... . Gap and x each fall into classes
by bit length, as in exponential Golomb codes; a class has as many raw bits as distinguish its members. The *symbol* of
a change, a byte, is gap class x value classes + value class. Huffman codes it as one letter: coded apart, classes of
less than a bit (nearly all differences are +-1) would each cost a whole bit. The *raw bits* of a change are those of
the gap below those of x; changes follow each other from bit 0 of byte 0, padded with zero bits to a byte.

    bits of a unit   gap classes                               value classes
    8                21: bit lengths 0 to 20                   9: bit lengths 0 to 8
    16               15: bit lengths 0 to 13, and the rest     17: bit lengths 0 to 16
    32               15: bit lengths 0 to 13, and the rest     17: bit lengths 0, 1-2, 3-4, ... 31-32
"""

from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct

from ebbtide.types.weights import TILE_BYTES

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Positions (uint32) and differences (unsigned units) of changes, in arrays that can be longer.
Changes: TypeAlias = tuple[Array, Array]

#: A gap that no tile can hold; the decoder reads it for symbols that do not exist.
NO_GAP: Final = (1 << 24) - 1


class Alphabet(Struct, frozen=True):
    """The tables for units of `width` bytes: 1, 2 or 4. All arrays are int64."""

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
