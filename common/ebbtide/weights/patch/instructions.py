"""Offers machine instructions that numba lacks, through LLVM's own: portable, one or few on x86 and Arm.

None checks bounds. After a change here, touch compiled_kernels.py too: numba's cache only looks at the caller's file.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numba.np import arrayobj  # type: ignore[import-untyped]

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
