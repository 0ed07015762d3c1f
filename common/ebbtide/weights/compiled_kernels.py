"""Compiles the kernels of `numpy_kernels` with numba: the same bytes, near the speed of memory. Import it late.

They run outside the GIL. An invalid patch leaves the target unchanged. The intrinsics that come first are machine
instructions that numba lacks, through LLVM's own: portable, one or few on x86 and Arm. None checks bounds.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numba.np import arrayobj  # type: ignore[import-untyped]

from ebbtide.weights.patch import Alphabet, Array, Changes

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, to: Any) -> Any:
    data = arrayobj.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def unequal_64(_: Any, a: Any, b: Any, start: Any) -> Any:  # noqa: ARG001 - numba goes by names
    """Set bit i if a[start + i] != b[start + i], for contiguous arrays of one type."""
    vector = ir.VectorType(ir.IntType(a.dtype.bitwidth), 64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = [
            builder.load(_address(context, builder, kind, array, args[2], vector), align=1)
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        ]
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), _I64)

    return types.uint64(a, b, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_: Any, number: Any) -> Any:  # noqa: ARG001 - numba goes by names
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_I1, 0))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(_: Any, number: Any) -> Any:  # noqa: ARG001 - numba goes by names
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(_I1, 0))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def ones(_: Any, number: Any) -> Any:  # noqa: ARG001 - numba goes by names
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_64(_: Any, raw: Any, offset: Any) -> Any:  # noqa: ARG001 - numba goes by names
    """Load the 8 bytes of a uint8 array from `offset`, in the machine's byte order (little-endian)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], args[0], args[1], _I64), align=1)

    return types.uint64(raw, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_64(_: Any, raw: Any, offset: Any, word: Any) -> Any:  # noqa: ARG001 - numba goes by names
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1], _I64), align=1)
        return context.get_dummy_value()

    return types.void(raw, types.uint64, types.uint64), generate


def _prefetch(locality: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1], _I8)
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (_I8.as_pointer(),), kind)
        builder.call(hint, [address, *(ir.Constant(_I32, number) for number in (0, locality, 1))])
        return context.get_dummy_value()

    return generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_first(_: Any, array: Any, index: Any) -> Any:  # noqa: ARG001 - numba goes by names
    """Prefetch the cache line of array[index] into the nearest cache; an invalid address does no harm."""
    return types.void(array, types.uint64), _prefetch(3)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_second(_: Any, array: Any, index: Any) -> Any:  # noqa: ARG001 - numba goes by names
    """Prefetch into the second cache, which has room for a tile."""
    return types.void(array, types.uint64), _prefetch(2)


_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def _jit(kernel: _Kernel) -> _Kernel:
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        compiled: _Kernel = njit(cache=True, **options)(kernel)
    except RuntimeError:  # numba finds no folder for its cache: each process compiles again
        compiled = njit(**options)(kernel)
    return compiled


@_jit
def _find(base: Array, new: Array, start: int, stop: int, found: Array) -> np.int64:
    """Write the indices in [start, stop) where the arrays differ. `found` has 64 more entries than there can be.

    Four or eight are written without a branch for each: a wrong prediction costs more (Langdale and Lemire, Parsing
    gigabytes of JSON per second, VLDB Journal 2019: index extraction).
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


#: Bytes of each array searched before their changes are coded, so that they are still in the core's nearest cache.
#: Measured: half as many gain nothing, twice as many cost an eighth.
_STRIDE = 4096


@_jit
def _letter(gap: np.int64, difference: np.int64, gaps: Array, values: Array) -> tuple[np.int64, np.int64, np.int64]:
    """Return a change's symbol, its raw bits, and their number."""
    folded = (difference << 1 ^ difference >> 63) - 1
    of_gap = gaps[leading_zeros(np.uint64(gap))]
    of_value = values[leading_zeros(np.uint64(folded))]
    of_both, one = of_gap + of_value, np.int64(1)
    gap_bits, value_bits = of_gap & 255, of_value & 255
    field = gap & ((one << gap_bits) - 1) | (folded & ((one << value_bits) - 1)) << gap_bits
    return of_both >> 32, field, of_both & 255


@_jit
def _code(
    base: Array, new: Array, gaps: Array, values: Array, empty_bits: int, symbols: Array, raw: Array
) -> tuple[np.int64, np.int64]:
    found = np.empty(_STRIDE + 64, np.uint32)
    count, bits, held, previous = np.int64(0), np.int64(0), np.int64(0), np.int64(-1)
    stride = _STRIDE // base.itemsize
    for start in range(0, len(base), stride):
        changes = _find(base, new, start, min(start + stride, len(base)), found)
        for index in range(changes):
            at = found[index]
            position = np.int64(at)
            difference = (np.int64(new[at]) - np.int64(base[at])) << empty_bits >> empty_bits
            symbol, field, width = _letter(position - previous - 1, difference, gaps, values)
            previous = position
            symbols[np.uint64(count + index)] = symbol
            held |= field << (bits & 7)
            store_64(raw, np.uint64(bits >> 3), np.uint64(held))
            held >>= ((bits + width >> 3) - (bits >> 3)) << 3
            bits += width
        count += changes
    return count, bits


@_jit
def _code_changes(
    positions: Array, differences: Array, gaps: Array, values: Array, empty_bits: int, symbols: Array, raw: Array
) -> tuple[np.int64, np.int64]:
    count, bits, held, previous = np.int64(0), np.int64(0), np.int64(0), np.int64(-1)
    for index in range(len(positions)):
        difference = np.int64(differences[index]) << empty_bits >> empty_bits
        if difference != 0:
            position = np.int64(positions[index])
            symbol, field, width = _letter(position - previous - 1, difference, gaps, values)
            previous = position
            symbols[np.uint64(count)] = symbol
            held |= field << (bits & 7)
            store_64(raw, np.uint64(bits >> 3), np.uint64(held))
            held >>= ((bits + width >> 3) - (bits >> 3)) << 3
            bits += width
            count += 1
    return count, bits


@_jit
def _decode(
    symbols: Array, raw: Array, limit: int, letters: Array, top: int, target: Array, length: int, into: Changes
) -> bool:
    """Decode as `numpy_kernels.decode` does, and prefetch `target` at each position for the addition that follows.

    The loop checks nothing: positions ascend, so checking the last one is enough, and `raw` has room for all.
    """
    positions, differences = into
    bits, position, seen, one = np.int64(0), np.int64(-1), np.int64(0), np.int64(1)
    for index in range(len(symbols)):
        entry = letters[symbols[index]]
        word = np.int64(load_64(raw, np.uint64(bits >> 3)) >> np.uint64(bits & 7))
        gap_bits, value_bits = entry & 255, entry >> 8 & 255
        position += (entry >> 16 & 0xFFFFFF) + (word & ((one << gap_bits) - 1))
        folded = (entry >> 40) + (word >> gap_bits & ((one << value_bits) - one))
        bits += gap_bits + value_bits
        prefetch_second(target, np.uint64(position))
        positions[index] = position
        differences[index] = folded
        seen |= folded
    for index in range(len(symbols)):  # a loop of its own, for vector instructions
        differences[index] = differences[index] >> 1 ^ -(differences[index] & 1)
    return bool(position < length and seen <= top) and _ends(raw, np.uint64(bits), np.uint64(limit))


@_jit
def _ends(raw: Array, bits: np.uint64, limit: np.uint64) -> bool:
    """Tell whether so many bits fill `limit` bits, whole bytes, except for fewer than 8 that are zero."""
    if bits > limit or bits + np.uint64(8) <= limit:
        return False
    left = load_64(raw, bits >> np.uint64(3)) >> (bits & np.uint64(7))
    return bool(left & ((np.uint64(1) << (limit - bits)) - np.uint64(1)) == 0)


#: With at least one change in so many bytes, changes are added as they are read, with memory prefetched `_AHEAD` bytes
#: ahead of them. Measured with bf16, that takes two thirds of the time of decoding all positions first and prefetching
#: only these at 3 % changed, but three times as long at 1 %.
_CROWDED = 90
_AHEAD = 4096


@_jit
def _add(
    symbols: Array, raw: Array, letters: Array, target: Array, sign: int
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Add the changes, or with `sign` -1 undo them, up to the first that lies outside of `target`.

    Returns their number, the number of their raw bits, and all bits that are set in any of their folded differences.
    Indices are unsigned: numba checks signed ones for counting from the end.
    """
    index, bits, seen, one = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(1)
    count, length = np.uint64(len(symbols)), np.uint64(len(target))
    ahead, further = np.uint64(_AHEAD // target.itemsize), np.uint64((_AHEAD + 128) // target.itemsize)
    position = np.uint64(0) - one
    while index < count:
        entry = np.uint64(letters[np.uint64(symbols[index])])
        word = load_64(raw, bits >> np.uint64(3)) >> (bits & np.uint64(7))
        gap_bits, value_bits = entry & np.uint64(255), entry >> np.uint64(8) & np.uint64(255)
        position += (entry >> np.uint64(16) & np.uint64(0xFFFFFF)) + (word & ((one << gap_bits) - one))
        if position >= length:
            break
        prefetch_first(target, position + ahead)
        prefetch_first(target, position + further)
        folded = (entry >> np.uint64(40)) + (word >> gap_bits & ((one << value_bits) - one))
        target[position] += sign * np.int64(folded >> one ^ (np.uint64(0) - (folded & one)))
        bits += gap_bits + value_bits
        seen |= folded
        index += one
    return index, bits, seen


@_jit
def _apply(symbols: Array, raw: Array, limit: int, letters: Array, top: int, target: Array, into: Changes) -> bool:
    if len(symbols) * _CROWDED < len(target) * target.itemsize:
        if not _decode(symbols, raw, limit, letters, top, target, len(target), into):
            return False
        positions, differences = into
        for index in range(len(symbols)):
            target[positions[index]] += differences[index]
        return True
    done, bits, seen = _add(symbols, raw, letters, target, 1)
    if done == np.uint64(len(symbols)) and seen <= np.uint64(top) and _ends(raw, bits, np.uint64(limit)):
        return True
    _add(symbols[:done], raw, letters, target, -1)  # the patch is broken: undo what was added
    return False


def code(base: Array, new: Array, letters: Alphabet, symbols: Array, raw: Array) -> tuple[int, int]:
    empty = 64 - 8 * letters.width
    count, bits = _code(base, new, letters.gaps, letters.values, empty, symbols, raw)
    return int(count), int(bits)


def code_changes(
    positions: Array, differences: Array, letters: Alphabet, symbols: Array, raw: Array
) -> tuple[int, int]:
    empty = 64 - 8 * letters.width
    count, bits = _code_changes(positions, differences, letters.gaps, letters.values, empty, symbols, raw)
    return int(count), int(bits)


def decode(symbols: Array, raw: Array, limit: int, letters: Alphabet, length: int, into: Changes) -> bool:
    return _decode(symbols, raw, limit, letters.symbols, (1 << 8 * letters.width) - 1, into[1], length, into)


def apply(symbols: Array, raw: Array, limit: int, letters: Alphabet, target: Array, into: Changes) -> bool:
    return _apply(symbols, raw, limit, letters.symbols, (1 << 8 * letters.width) - 1, target, into)
