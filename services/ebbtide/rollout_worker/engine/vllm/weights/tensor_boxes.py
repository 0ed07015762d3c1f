"""Computes slices of tensors: the slice that a strided view shows, and the union of several. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from ebbtide.types.weights import Box

#: The slices that are read of each tensor; none: it is not read.
Boxes = Mapping[str, tuple[Box, ...]]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of that shape."""
    return tuple((0, length) for length in shape)


def viewed(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> Box | None:
    """The slice of a contiguous tensor of `shape` with just the elements of the view (offset, size, stride; in
    elements), however the view orders, splits or merges dimensions. None if those elements are no slice: with a step,
    for example, or across the ends of rows."""
    if 0 in size:
        return tuple((0, 0) for _ in shape) or None
    strides = _strides(shape)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    box = tuple(
        (offset // step % length, last // step % length + 1) for length, step in zip(shape, strides, strict=True)
    )
    lengths = [stop - start for start, stop in box]
    inside = all(length > 0 for length in lengths)
    return box if inside and _runs(lengths, strides) == _runs(size, stride) else None


def union(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements in fewer slices: contained ones vanish, adjoining or overlapping ones in line become one."""
    merged: list[Box] = []
    for box in boxes:
        grown = box
        while (index := next((i for i, other in enumerate(merged) if _joined(grown, other)), None)) is not None:
            grown = _joined(grown, merged.pop(index)) or grown
        merged.append(grown)
    return tuple(sorted(merged))


def together(ranks: Sequence[Boxes | None]) -> Boxes | None:
    """The slices that any rank of an engine reads; None, everything, if one of them cannot tell."""
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    names = dict.fromkeys(name for rank in known for name in rank)
    return {name: union(box for rank in known for box in rank.get(name, ())) for name in names}


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = list[int](), 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]


def _runs(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """The (step, length) pairs in a normal form: two views with the same offset and runs show the same elements."""
    runs: list[tuple[int, int]] = []
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 1 or step == 0:  # step 0: an expanded dimension shows the same elements again
            continue
        if runs and runs[-1][0] * runs[-1][1] == step:
            runs[-1] = (runs[-1][0], runs[-1][1] * length)
        else:
            runs.append((step, length))
    return runs


def _joined(one: Box, other: Box) -> Box | None:
    """One slice for both, if there is one: they differ in at most one dimension, or one contains the other."""
    hull = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    if hull in {one, other}:
        return hull
    differing = [(a, b, c, d) for (a, b), (c, d) in zip(one, other, strict=True) if (a, b) != (c, d)]
    if len(differing) > 1:
        return None
    ((a, b, c, d),) = differing
    return hull if max(a, c) <= min(b, d) else None
