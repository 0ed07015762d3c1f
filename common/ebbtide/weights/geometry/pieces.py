"""Whether the pieces of a tensor make it up: every element in one of them, and none in two.

A box is known by its corners with their signs, + where an even number of coordinates are ends: they are the
differences, along all dimensions, of the function that is 1 in the box and 0 elsewhere, and running sums give it back
(as in summed-area tables: Crow, SIGGRAPH 1984). So boxes make up a tensor if and only if their signed corners add up to
the tensor's. That takes n log n steps for n boxes, however they lie.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TensorEntry

#: Flat positions, as many as their signs say: those of + and those of -.
_Corners: TypeAlias = tuple[list[int], list[int]]


def check_pieces(pieces: Sequence[TensorEntry], most: int) -> None:
    """Refuse pieces, each within one tensor, that are not all of it or overlap. Raises `InvalidRequest` naming it.

    Time and memory double with each dimension along which the tensor is cut: more than `most` are refused before.
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
    """Give each point another flat position, ends included."""
    return [math.prod(length + 1 for length in lengths[:axis]) for axis in range(len(lengths))]


def _corners(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> _Corners:
    plus, minus = [sum(map(int.__mul__, start, strides))], list[int]()
    for length, stride in zip(shape, strides, strict=True):
        step = length * stride
        plus, minus = plus + [at + step for at in minus], minus + [at + step for at in plus]
    return plus, minus
