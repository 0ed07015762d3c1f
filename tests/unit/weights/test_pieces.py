"""Pieces are accepted exactly if every element of their tensor lies in one of them, and none in two."""

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Box, PolicyVersion, TensorEntry
from ebbtide.weights import ManifestJoiner, ManifestPart, check_manifest, seal_manifest
from ebbtide.weights.geometry import check_pieces

VERSION = PolicyVersion(policy="policy", version=1, root=bytes(32))


def piece(box: Box, full: tuple[int, ...], name: str = "w") -> TensorEntry:
    shape, start = tuple(last - first for first, last in box), tuple(first for first, _ in box)
    size = math.prod(shape)
    return TensorEntry(name=name, dtype="U8", shape=shape, size=size, digests=(bytes(32),), start=start, full=full)


def make_up(boxes: Sequence[Box], full: tuple[int, ...]) -> bool:
    try:
        check_pieces([piece(box, full) for box in boxes], 6)
    except InvalidRequest:
        return False
    return True


def counted(boxes: Sequence[Box], full: tuple[int, ...]) -> bool:
    """The same, by counting each element."""
    count = np.zeros(full, np.int64)
    for box in boxes:
        count[tuple(slice(*ends) for ends in box)] += 1
    return bool((count == 1).all())


def split(rng: np.random.Generator, full: tuple[int, ...], times: int) -> list[Box]:
    """Boxes that make up the tensor: one of them is cut in two, again and again."""
    boxes: list[Box] = [tuple((0, length) for length in full)]
    for _ in range(times):
        at = int(rng.integers(len(boxes)))
        axis = int(rng.integers(len(full)))
        first, last = boxes[at][axis]
        if last - first > 1:
            middle = int(rng.integers(first + 1, last))
            box = boxes.pop(at)
            boxes += [(*box[:axis], ends, *box[axis + 1 :]) for ends in ((first, middle), (middle, last))]
    return boxes


def spoilt(rng: np.random.Generator, boxes: list[Box], full: tuple[int, ...]) -> list[Box]:
    """The boxes with one of them moved, grown, shrunk, left out, or there twice; maybe two such changes."""
    for _ in range(int(rng.integers(1, 3))):
        at, axis = int(rng.integers(len(boxes))), int(rng.integers(len(full)))
        first, last = sorted(rng.choice(full[axis] + 1, 2, replace=False).tolist())
        changed = (*boxes[at][:axis], (first, last), *boxes[at][axis + 1 :])
        kept = [box for place, box in enumerate(boxes) if place != at]
        boxes = [[*kept, changed], [*boxes, changed], [*boxes, boxes[at]], kept or boxes][int(rng.integers(4))]
    return boxes


def test_boxes_are_accepted_exactly_if_each_element_is_in_one_of_them() -> None:
    rng = np.random.default_rng(5)
    outcomes = [0, 0]
    for _ in range(4000):
        full = tuple(int(length) for length in rng.integers(1, 6, int(rng.integers(1, 5))))
        boxes = split(rng, full, int(rng.integers(0, 12)))
        rng.shuffle(boxes)
        assert make_up(boxes, full)
        boxes = spoilt(rng, boxes, full)
        expected = counted(boxes, full)
        assert make_up(boxes, full) == expected, (full, boxes)
        outcomes[expected] += 1
    assert min(outcomes) > 100


def test_every_set_of_small_boxes_is_judged_as_its_elements_are() -> None:
    full = (2, 3)
    sides = [[(a, b) for a in range(length) for b in range(a + 1, length + 1)] for length in full]
    boxes: list[Box] = list(itertools.product(*sides))
    for count in range(1, 5):
        for some in itertools.combinations_with_replacement(boxes, count):
            assert make_up(some, full) == counted(some, full), some


def test_boxes_that_no_cut_parts_are_accepted() -> None:
    wheel: list[Box] = [((0, 2), (0, 1)), ((2, 3), (0, 2)), ((1, 3), (2, 3)), ((0, 1), (1, 3)), ((1, 2), (1, 2))]
    assert make_up(wheel, (3, 3))
    assert not make_up([*wheel[:4], wheel[3]], (3, 3))  # as many elements, one of them twice


def test_what_is_wrong_with_pieces_is_said() -> None:
    for boxes, full, text in (
        ([((0, 1),), ((2, 3),)], (3,), "is not all of"),
        ([((0, 2),), ((1, 3),)], (3,), "overlap"),
        ([((0, 2),), ((1, 2),)], (3,), "overlap"),
        ([((0, 1),) * 7], (2,) * 7, "more than 6 dimensions"),
    ):
        with pytest.raises(InvalidRequest, match=f"w: .*{text}"):
            check_pieces([piece(tuple(box), full) for box in boxes], 6)


@pytest.mark.parametrize(
    ("tensors", "rows", "columns"), [(1, 4096, 1), (1, 64, 64), (100, 256, 1)], ids=["one row", "a grid", "many ranks"]
)
def test_as_many_pieces_as_there_may_be_are_checked_at_once(tensors: int, rows: int, columns: int) -> None:
    full = (rows, columns)
    boxes: list[Box] = [((i, i + 1), (j, j + 1)) for i in range(rows) for j in range(columns)]
    entries = [piece(box, full, f"w{number}") for number in range(tensors) for box in boxes]
    began = time.process_time()
    joiner = ManifestJoiner()
    joiner.add(ManifestPart(run_id="run", version=VERSION, tile_bytes=16))
    joiner.add(ManifestPart(tensors=tuple(entries)))
    joined = joiner.join()
    manifest = seal_manifest("run", VERSION, entries, 16)
    assert joined.tensors == manifest.tensors
    check_manifest(manifest)
    assert time.process_time() - began < 3.0
