"""Checks that the pieces of a tensor cover each of its elements exactly once.

A box is determined by its signed corners, + where an even number of coordinates are ends. They are the differences,
along all dimensions, of the function that is 1 in the box and 0 elsewhere; running sums restore it (as in summed-area
tables: Crow, SIGGRAPH 1984). So boxes make up a tensor if and only if their signed corners add up to the tensor's. That
takes n log n steps for n boxes in any arrangement.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TensorEntry

#: Flat positions of the corners with sign + and of those with sign -, repeated as often as they occur.
_Corners: TypeAlias = tuple[list[int], list[int]]


def check_pieces(pieces: Sequence[TensorEntry], most: int) -> None:
    """Raise `InvalidRequest` naming the tensor if its pieces, each within it, overlap or leave something out.

    Time and memory double with each dimension along which the tensor is cut, so more than `most` are refused first.
    """
    name, full = pieces[0].name, pieces[0].full
    cut = [axis for axis, length in enumerate(full) if any(piece.shape[axis] != length for piece in pieces)]
    if len(cut) > most:
        raise InvalidRequest(f"is cut along more than {most} dimensions", field=name)
    if sum(math.prod(piece.shape) for piece in pieces) < math.prod(full):
        raise InvalidRequest(f"is not all of {list(full)} in its pieces", field=name)
    strides = _strides([full[axis] for axis in cut])
    plus, minus = _corners([0] * len(cut), [full[axis] for axis in cut], strides)
    for piece in pieces:
        more, less = _corners([piece.start[axis] for axis in cut], [piece.shape[axis] for axis in cut], strides)
        plus += less
        minus += more
    if sorted(plus) != sorted(minus):
        raise InvalidRequest("has pieces that overlap", field=name)


def _strides(lengths: Sequence[int]) -> list[int]:
    """Return strides that give each point, ends included, a flat position of its own."""
    return [math.prod(length + 1 for length in lengths[:axis]) for axis in range(len(lengths))]


def _corners(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> _Corners:
    plus, minus = [sum(map(int.__mul__, start, strides))], list[int]()
    for length, stride in zip(shape, strides, strict=True):
        step = length * stride
        plus, minus = plus + [at + step for at in minus], minus + [at + step for at in plus]
    return plus, minus
