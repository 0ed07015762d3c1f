"""What a strided view of a tensor shows, against numpy's own answer."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ebbtide.rollout_worker.engine import Boxes
from ebbtide.rollout_worker.engine.vllm.version_updates import together, union, viewed, whole
from ebbtide.types.weights import Box

Array = NDArray[np.int64]
SHAPES = [(), (6,), (4, 6), (3, 4, 2), (1, 5, 1)]
VIEWS: dict[str, Callable[[Array], Array]] = {
    "all of it": lambda a: a,
    "flat": lambda a: a.reshape(-1),
    "transposed": lambda a: a.T,
    "the first half": lambda a: a[: max(1, len(a) // 2)],
    "the second half": lambda a: a[len(a) // 2 :],
    "one of the first dimension": lambda a: a[len(a) - 1],
    "columns": lambda a: a[..., 1:3],
    "columns, transposed": lambda a: a[..., 1:3].T,
    "rows split in two": lambda a: a.reshape(2, -1, *a.shape[1:])[1],
    "a new dimension": lambda a: a[None, 1:],
    "expanded": lambda a: np.broadcast_to(a[:1], (3, *a.shape[1:])),
    "every second": lambda a: a[::2],
    "across the ends of rows": lambda a: a.reshape(-1)[1:-1],
    "every second column": lambda a: a[..., ::2],
    "nothing": lambda a: a[:0],
}


def elements(shape: tuple[int, ...], box: Box) -> set[int]:
    flat = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return set(flat[tuple(slice(*pair) for pair in box)].ravel().tolist())


def slice_of(shape: tuple[int, ...], shown: set[int]) -> bool:
    """Whether a slice shows just these elements."""
    ranges = [list(itertools.combinations(range(length + 1), 2)) for length in shape]
    return any(elements(shape, box) == shown for box in itertools.product(*ranges))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_view_is_the_slice_that_has_just_its_elements(shape: tuple[int, ...], name: str) -> None:
    tensor = np.arange(np.prod(shape, dtype=np.int64), dtype=np.int64).reshape(shape)
    try:
        view = VIEWS[name](tensor)
    except (IndexError, ValueError, TypeError):
        return  # a tensor of that shape has no such view
    start = int(view.ravel()[0]) if view.size else 0
    found = viewed(shape, start, view.shape, [step // 8 for step in view.strides])
    shown = set(view.ravel().tolist())
    if found is not None:
        assert elements(shape, found) == shown
    else:
        assert not slice_of(shape, shown)


def test_slices_become_few_and_cover_the_same() -> None:
    random = np.random.default_rng(7)
    for _ in range(300):
        corners = np.sort(random.integers(0, 6, (random.integers(1, 6), 2, 2)), axis=2)
        boxes: list[Box] = [tuple((int(a), int(b) + 1) for a, b in box) for box in corners]
        covered = union(boxes)
        every = set.union(*(elements((7, 7), box) for box in boxes))
        assert set.union(*(elements((7, 7), box) for box in covered)) == every
        assert len(covered) <= len(boxes)


def test_shards_of_all_ranks_are_the_whole_tensor() -> None:
    ranks: list[Boxes | None] = [
        {"rows": (((0, 2), (0, 8)),), "columns": (((0, 4), (0, 4)),), "one": (((0, 3),),)},
        {"rows": (((2, 4), (0, 8)),), "columns": (((0, 4), (4, 8)),), "one": ()},
    ]
    assert together(ranks) == {"rows": (whole((4, 8)),), "columns": (whole((4, 8)),), "one": (whole((3,)),)}


def test_one_rank_that_cannot_tell_needs_everything() -> None:
    assert together([{"rows": (((0, 2),),)}, None]) is None
