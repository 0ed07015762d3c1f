"""The kernels of plain.py, compiled: the same bytes, near the speed of memory. Imports numba, so import it late.

They run outside the GIL. What they read of a patch is checked as a whole before the target is written.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from ebbtide.weights.patch.alphabet import Alphabet, Array, Changes
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


#: Bytes of each array searched before their changes are coded, which then are still in the cache nearest to the core.
#: Measured: half as many gain nothing, twice as many cost an eighth.
_STRIDE = 4096


@_jit
def _code(
    base: Array, new: Array, gaps: Array, values: Array, empty_bits: int, symbols: Array, raw: Array
) -> tuple[np.int64, np.int64]:
    found = np.empty(_STRIDE + 64, np.uint32)
    count, bits, held, previous = np.int64(0), np.int64(0), np.int64(0), np.int64(-1)
    one, stride = np.int64(1), _STRIDE // base.itemsize
    for start in range(0, len(base), stride):
        changes = _find(base, new, start, min(start + stride, len(base)), found)
        for index in range(changes):
            at = found[index]
            position = np.int64(at)
            gap = position - previous - 1
            previous = position
            difference = (np.int64(new[at]) - np.int64(base[at])) << empty_bits >> empty_bits
            folded = (difference << 1 ^ difference >> 63) - 1
            of_gap = gaps[leading_zeros(np.uint64(gap))]
            of_value = values[leading_zeros(np.uint64(folded))]
            of_both = of_gap + of_value
            symbols[np.uint64(count + index)] = of_both >> 32
            gap_bits, value_bits = of_gap & 255, of_value & 255
            field = gap & ((one << gap_bits) - 1) | (folded & ((one << value_bits) - 1)) << gap_bits
            held |= field << (bits & 7)
            store_64(raw, np.uint64(bits >> 3), np.uint64(held))
            after = bits + (of_both & 255)
            held >>= ((after >> 3) - (bits >> 3)) << 3
            bits = after
        count += changes
    return count, bits


@_jit
def _decode(symbols: Array, raw: Array, limit: int, letters: Array, top: int, target: Array, into: Changes) -> bool:
    """Nothing is asked within the loop: positions ascend, so that the last one tells, and `raw` has room for all.

    The memory at each position of `target` is asked for while the next ones are read: applying waits for memory most.
    """
    positions, differences = into
    bits, position, seen, one = np.int64(0), np.int64(-1), np.int64(0), np.int64(1)
    for index in range(len(symbols)):
        entry = letters[symbols[index]]
        word = np.int64(load_64(raw, np.uint64(bits >> 3)) >> np.uint64(bits & 7))
        gap_bits, value_bits = entry & 255, entry >> 8 & 255
        position += (entry >> 16 & 0xFFFFFF) + (word & ((one << gap_bits) - 1))
        folded = (entry >> 40) + (word >> gap_bits & ((one << value_bits) - 1))
        bits += gap_bits + value_bits
        prefetch(target, np.uint64(position))
        positions[index] = position
        differences[index] = folded
        seen |= folded
    for index in range(len(symbols)):  # a loop of its own, for vector instructions
        differences[index] = differences[index] >> 1 ^ -(differences[index] & 1)
    if position >= len(target) or seen > top or not bits <= limit < bits + 8:
        return False
    left = load_64(raw, np.uint64(bits >> 3)) >> np.uint64(bits & 7)
    return bool(left & ((np.uint64(1) << np.uint64(limit - bits)) - np.uint64(1)) == 0)


@_jit
def _apply(symbols: Array, raw: Array, limit: int, letters: Array, top: int, target: Array, into: Changes) -> bool:
    if not _decode(symbols, raw, limit, letters, top, target, into):
        return False
    positions, differences = into
    for index in range(len(symbols)):
        target[positions[index]] += differences[index]
    return True


def code(base: Array, new: Array, letters: Alphabet, symbols: Array, raw: Array) -> tuple[int, int]:
    empty = 64 - 8 * letters.width
    count, bits = _code(base, new, letters.gaps, letters.values, empty, symbols, raw)
    return int(count), int(bits)


def decode(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: Changes) -> bool:
    return _decode(symbols, raw, limit, letters.symbols, (1 << 8 * letters.width) - 1, target, into)


def apply(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: Changes) -> bool:
    return _apply(symbols, raw, limit, letters.symbols, (1 << 8 * letters.width) - 1, target, into)
