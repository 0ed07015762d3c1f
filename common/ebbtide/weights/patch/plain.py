"""The kernels in plain numpy: what the compiled ones must equal byte for byte, and what runs where numba is missing."""

import numpy as np

from ebbtide.weights.patch.alphabet import Alphabet, Array


def code(base: Array, new: Array, letters: Alphabet, symbols: Array, raw: Array) -> tuple[int, int]:
    """Write the symbols (uint8) and raw bits (uint8) of all changes; give their number and that of the bits.

    `base` and `new` are unsigned, of one length, at most a tile; `raw` has 8 bytes more than the bits can need.
    """
    positions = np.flatnonzero(base != new)
    gaps = np.diff(positions, prepend=-1) - 1
    signed = np.dtype(f"<i{letters.width}")
    differences = (new[positions] - base[positions]).view(signed).astype(np.int64)
    folded = (differences << 1 ^ differences >> 63) - 1
    of_gap, of_value = letters.gaps[_bit_lengths(gaps)], letters.values[_bit_lengths(folded)]
    symbols[: len(positions)] = (of_gap >> 32) + (of_value >> 32)
    gap_bits, value_bits = of_gap & 255, of_value & 255
    fields = gaps & (1 << gap_bits) - 1 | (folded & (1 << value_bits) - 1) << gap_bits
    return len(positions), _pack(fields.astype(np.uint64), gap_bits + value_bits, raw)


def decode(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: tuple[Array, Array]) -> int:
    """Write positions (uint32) and differences (unsigned units) of all symbols, at least one, to `into`.

    Gives the number of raw bits used; or -1, whatever was written, if that would be more than `limit`, a position lies
    beyond `target`, or a difference is out of range. `target` is neither read nor written. `raw` has 8 bytes
    more than `limit` bits.
    """
    entries = letters.symbols[symbols]
    gap_bits, value_bits = entries & 255, entries >> 8 & 255
    widths = gap_bits + value_bits
    used = int(widths.sum())
    if used > limit:
        return -1
    fields = _unpack(raw, widths).astype(np.int64)
    gaps = (entries >> 16 & 0xFFFFFF) + (fields & (1 << gap_bits) - 1)
    folded = (entries >> 40) + (fields >> gap_bits & (1 << value_bits) - 1) + 1
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= len(target) or int(folded.max()) >> 8 * letters.width:
        return -1
    into[0][: len(symbols)] = positions
    into[1][: len(symbols)] = folded >> 1 ^ -(folded & 1)
    return used


def add(into: Array, positions: Array, differences: Array) -> None:
    """Add the differences to the units at `positions`, which are distinct and in range, modulo 2^bits."""
    into[positions] += differences


def _bit_lengths(numbers: Array) -> Array:
    lengths: Array = np.frexp(numbers.astype(np.float64))[1]  # exact below 2^53
    return lengths


def _pack(fields: Array, widths: Array, raw: Array) -> int:
    """Put fields of `widths` bits after one another; 64-bit words are filled from their lowest bit."""
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
    """Fields that start where the widths before them end; bits above their widths are left in."""
    starts = np.cumsum(widths) - widths
    words, shifts = starts >> 6, (starts & 63).astype(np.uint64)
    packed = np.zeros((len(raw) >> 3) + 2, np.uint64)
    packed.view(np.uint8)[: len(raw)] = raw
    fields: Array = packed[words] >> shifts | packed[words + 1] << np.uint64(1) << (np.uint64(63) - shifts)
    return fields
