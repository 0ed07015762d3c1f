"""What two lists of tensors must share to be one architecture."""

import pytest

from ebbtide.rollout_worker.engine.checkpoint_facts import misfits

SHAPES = {"a": (2, 3), "b": (4,), "c": (), "d": (1,)}


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (SHAPES, ""),
        ({name: list(shape) for name, shape in SHAPES.items()}, ""),
        ({**SHAPES, "b": (5,)}, "b"),
        ({**SHAPES, "b": (4, 1), "a": (3, 2)}, "a, b"),
        ({"a": (9,), "e": ()}, "b, c, d"),
        ({}, "a, b, c"),
    ],
)
def test_tensors_that_do_not_fit_are_named(found: dict[str, tuple[int, ...]], names: str) -> None:
    assert misfits(found, SHAPES) == names
