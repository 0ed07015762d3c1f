"""Implements the kernels in plain numpy: the reference for the compiled ones, and the fallback without numba."""

import numpy as np

from ebbtide.weights.patch import Alphabet, Array, Changes


def code(base: Array, new: Array, letters: Alphabet, symbols: Array, raw: Array) -> tuple[int, int]:
    """Write the symbols (uint8) and raw bits (uint8) of all changes; return the numbers of changes and of bits.

    `base` and `new` are unsigned, of one length, at most a tile; `raw` has 8 bytes more than the bits can need.
    """
    positions = np.flatnonzero(base != new)
    return code_changes(positions, new[positions] - base[positions], letters, symbols, raw)


def code_changes(
    positions: Array, differences: Array, letters: Alphabet, symbols: Array, raw: Array
) -> tuple[int, int]:
    """Code changes found elsewhere: ascending positions in a tile, unsigned differences (0: unchanged)."""
    positions, differences = positions[differences != 0], differences[differences != 0]
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    signed = differences.view(np.dtype(f"<i{letters.width}")).astype(np.int64)
    folded = (signed << 1 ^ signed >> 63) - 1
    of_gap, of_value = letters.gaps[_leading_zeros(gaps)], letters.values[_leading_zeros(folded)]
    symbols[: len(positions)] = (of_gap >> 32) + (of_value >> 32)
    gap_bits, value_bits = of_gap & 255, of_value & 255
    fields = gaps & (1 << gap_bits) - 1 | (folded & (1 << value_bits) - 1) << gap_bits
    return len(positions), _pack(fields.astype(np.uint64), gap_bits + value_bits, raw)


def decode(symbols: Array, raw: Array, limit: int, letters: Alphabet, length: int, into: Changes) -> bool:
    """Write the changes coded by the symbols, at least one, and `limit` raw bits, whole bytes of `raw`.

    Returns whether all positions are below `length`, all differences are in range, and the symbols use all bits except
    fewer than 8 zero bits. If not, discard what was written. `raw` must have room for the bits of as many symbols of
    any kind, and 8 bytes more; its content beyond the limit does not matter.
    """
    entries = letters.symbols[symbols]
    gap_bits, value_bits = entries & 255, entries >> 8 & 255
    widths = gap_bits + value_bits
    used = int(widths.sum())
    if not used <= limit < used + 8 or (used & 7 and raw[used >> 3] >> (used & 7)):
        return False
    fields = _unpack(raw[: limit >> 3], widths).astype(np.int64)
    strides = (entries >> 16 & 0xFFFFFF) + (fields & (1 << gap_bits) - 1)
    folded = (entries >> 40) + (fields >> gap_bits & (1 << value_bits) - 1)
    positions = np.cumsum(strides) - 1
    if positions[-1] >= length or int(folded.max()) >> 8 * letters.width:
        return False
    into[0][: len(symbols)] = positions
    into[1][: len(symbols)] = folded >> 1 ^ -(folded & 1)
    return True


def apply(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: Changes) -> bool:
    """Add the differences to the units of `target`, modulo 2^bits. Returns False, with `target` unchanged, for changes
    that `decode` refuses. `into` is scratch."""
    if not decode(symbols, raw, limit, letters, len(target), into):
        return False
    target[into[0][: len(symbols)]] += into[1][: len(symbols)]
    return True


def _leading_zeros(numbers: Array) -> Array:
    lengths: Array = np.frexp(numbers.astype(np.float64))[1]  # exact below 2^53
    return 64 - lengths


def _pack(fields: Array, widths: Array, raw: Array) -> int:
    """Write fields of `widths` bits back to back; 64-bit words are filled from their lowest bit."""
    ends = np.cumsum(widths)
    bits = int(ends[-1]) if len(ends) else 0
    starts = ends - widths
    words, shifts = starts >> 6, (starts & 63).astype(np.uint64)
    packed = np.zeros((bits >> 6) + 2, np.uint64)
    np.bitwise_or.at(packed, words, fields << shifts)
    np.bitwise_or.at(packed, words + 1, fields >> np.uint64(1) >> (np.uint64(63) - shifts))
    size = (bits + 7) >> 3
    raw[:size] = packed.view(np.uint8)[:size]
    return bits


def _unpack(raw: Array, widths: Array) -> Array:
    """Return the fields, each starting where the widths before it end; bits above a field's width stay in."""
    starts = np.cumsum(widths) - widths
    words, shifts = starts >> 6, (starts & 63).astype(np.uint64)
    packed = np.zeros((len(raw) >> 3) + 2, np.uint64)
    packed.view(np.uint8)[: len(raw)] = raw
    fields: Array = packed[words] >> shifts | packed[words + 1] << np.uint64(1) << (np.uint64(63) - shifts)
    return fields
