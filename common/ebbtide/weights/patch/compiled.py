"""The kernels of plain.py, compiled: the same bytes, near the speed of memory. Imports numba, so import it late.

They run outside the GIL and check every index that comes out of a patch before it is used.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from ebbtide.weights.patch.alphabet import Alphabet, Array
from ebbtide.weights.patch.instructions import (
    leading_zeros,
    load_64,
    ones,
    prefetch,
    store_64,
    trailing_zeros,
    unequal_64,
)

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def _jit(kernel: _Kernel) -> _Kernel:
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        compiled: _Kernel = njit(cache=True, **options)(kernel)
    except RuntimeError:  # no folder that may hold the cache: compile anew in each process
        compiled = njit(**options)(kernel)
    return compiled


@_jit
def _find(base: Array, new: Array, start: int, stop: int, found: Array) -> np.int64:
    """Indices in [start, stop) where the arrays differ. `found` has 64 entries more than there may be of them.

    Up to eight are written without asking how many there are: a branch taken wrongly costs more (Langdale and
    Lemire, Parsing gigabytes of JSON per second, VLDB Journal 2019: index extraction).
    """
    count, one = np.uint64(0), np.uint64(1)
    first, last = np.uint64(start), np.uint64(stop)
    while first + np.uint64(64) <= last:
        mask = unequal_64(base, new, first)
        if mask:
            more = ones(mask)
            for slot in range(4):
                found[count + np.uint64(slot)] = first + trailing_zeros(mask)
                mask &= mask - one
            if more > np.uint64(4):
                for slot in range(4, 8):
                    found[count + np.uint64(slot)] = first + trailing_zeros(mask)
                    mask &= mask - one
                slot_from = count + np.uint64(8)
                while mask:
                    found[slot_from] = first + trailing_zeros(mask)
                    mask &= mask - one
                    slot_from += one
            count += more
        first += np.uint64(64)
    while first < last:
        if base[first] != new[first]:
            found[count] = first
            count += one
        first += one
    return np.int64(count)


#: Units searched before their changes are coded: they are still in the cache nearest to the core.
_STRIDE = 4096


@_jit
def _code(
    base: Array, new: Array, gaps: Array, values: Array, empty_bits: int, symbols: Array, raw: Array
) -> tuple[np.int64, np.int64]:
    found = np.empty(_STRIDE + 64, np.uint32)
    count, bits, held, previous = np.int64(0), np.int64(0), np.int64(0), np.int64(-1)
    one = np.int64(1)
    for start in range(0, len(base), _STRIDE):
        changes = _find(base, new, start, min(start + _STRIDE, len(base)), found)
        for index in range(changes):
            at = found[index]
            position = np.int64(at)
            gap = position - previous - 1
            previous = position
            difference = (np.int64(new[at]) - np.int64(base[at])) << empty_bits >> empty_bits
            folded = (difference << 1 ^ difference >> 63) - 1
            of_gap = gaps[np.uint64(64) - leading_zeros(np.uint64(gap))]
            of_value = values[np.uint64(64) - leading_zeros(np.uint64(folded))]
            symbols[np.uint64(count + index)] = (of_gap >> 32) + (of_value >> 32)
            gap_bits, value_bits = of_gap & 255, of_value & 255
            field = gap & ((one << gap_bits) - 1) | (folded & ((one << value_bits) - 1)) << gap_bits
            held |= field << (bits & 7)
            store_64(raw, np.uint64(bits >> 3), np.uint64(held))
            after = bits + gap_bits + value_bits
            held >>= ((after >> 3) - (bits >> 3)) << 3
            bits = after
        count += changes
    return count, bits


@_jit
def _decode(
    symbols: Array,
    raw: Array,
    limit: int,
    letters: Array,
    top: int,
    target: Array,
    positions: Array,
    differences: Array,
) -> np.int64:
    """Every position is asked for in `target` while the next ones are read: memory is what applying waits for."""
    bits, position, one = np.int64(0), np.int64(-1), np.int64(1)
    worst = np.int64(0)
    units = len(target)
    for index in range(len(symbols)):
        entry = letters[symbols[index]]
        word = np.int64(load_64(raw, np.uint64(bits >> 3)) >> np.uint64(bits & 7))
        gap_bits, value_bits = entry & 255, entry >> 8 & 255
        position += (entry >> 16 & 0xFFFFFF) + (word & ((one << gap_bits) - 1)) + 1
        folded = (entry >> 40) + (word >> gap_bits & ((one << value_bits) - 1)) + 1
        bits += gap_bits + value_bits
        if position >= units or bits > limit:
            return np.int64(-1)
        prefetch(target, np.uint64(position))
        positions[index] = position
        differences[index] = folded >> 1 ^ -(folded & 1)
        worst = max(worst, folded)
    return np.int64(-1) if worst > top else bits


@_jit
def _add(into: Array, positions: Array, differences: Array) -> None:
    for index in range(len(positions)):
        into[positions[index]] += differences[index]


def code(base: Array, new: Array, letters: Alphabet, symbols: Array, raw: Array) -> tuple[int, int]:
    empty = 64 - 8 * letters.width
    count, bits = _code(base, new, letters.gaps, letters.values, empty, symbols, raw)
    return int(count), int(bits)


def decode(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: tuple[Array, Array]) -> int:
    top = (1 << 8 * letters.width) - 1
    return int(_decode(symbols, raw, limit, letters.symbols, top, target, *into))


def add(into: Array, positions: Array, differences: Array) -> None:
    _add(into, positions, differences)
