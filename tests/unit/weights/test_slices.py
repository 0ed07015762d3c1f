"""Just the tiles that hold an element of a slice, however the tensor was cut."""

import itertools

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Box, Manifest, PolicyVersion
from ebbtide.weights import NamedTensor, Place, build_manifest, places, places_of
from ebbtide.weights.tensors import carrier
from tests.unit.weights.chain import chain

SHAPES = [((), ()), ((1,), (0,)), ((40,), (0,)), ((7, 9), (1,)), ((5, 4, 6), (0, 2)), ((3, 2, 3, 5), (1, 3))]


def pieces(shape: tuple[int, ...], axes: tuple[int, ...], rng: np.random.Generator) -> list[Box]:
    """A random cut of a tensor along `axes`."""
    cuts: list[list[tuple[int, int]]] = []
    for axis, length in enumerate(shape):
        edge = int(rng.integers(1, length)) if axis in axes and length > 1 else length
        cuts.append([part for part in ((0, edge), (edge, length)) if part[0] < part[1]])
    return list(itertools.product(*cuts))


def version(shape: tuple[int, ...], boxes: list[Box], dtype: str, tile_bytes: int) -> Manifest:
    tensors = []
    for box in boxes:
        size = tuple(b - a for a, b in box)
        data = bytes(carrier(dtype).itemsize * int(np.prod(size, dtype=int)))
        tensor = NamedTensor(name="t", dtype=dtype, shape=size, data=memoryview(data))
        if len(boxes) > 1:
            start = tuple(a for a, _ in box)
            tensor = NamedTensor(name="t", dtype=dtype, shape=size, data=memoryview(data), start=start, full=shape)
        tensors.append(tensor)
    return build_manifest("run", PolicyVersion(policy="p", version=1), tensors, tile_bytes)


def one_by_one(manifest: Manifest, wanted: list[Box]) -> list[Place]:
    """Every element's bytes are asked where they lie."""
    found: set[Place] = set()
    for tensor, entry in enumerate(manifest.tensors):
        width = carrier(entry.dtype).itemsize
        for flat, index in enumerate(np.ndindex(*entry.shape)):
            at = [i + first for i, (first, _) in zip(index, entry.box, strict=True)]
            if any(all(a <= i < b for i, (a, b) in zip(at, box, strict=True)) for box in wanted):
                found |= {(tensor, (flat * width + byte) // manifest.tile_bytes) for byte in range(width)}
    return sorted(found)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_they_are_those_that_asking_every_element_finds(
    shape: tuple[int, ...], axes: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for dtype, tile_bytes in itertools.product(("U8", "BF16", "F64"), (1, 3, 16, 1 << 20)):
        manifest = version(shape, pieces(shape, axes, rng), dtype, tile_bytes)
        wanted = [
            tuple(tuple(sorted(rng.integers(0, length + 1, 2).tolist())) for length in shape)
            for _ in range(int(rng.integers(0, 3)))
        ]
        assert places_of(manifest, {"t": wanted}) == one_by_one(manifest, wanted)


def test_whole_tensors_are_all_tiles() -> None:
    manifest = chain(1)[0].manifest
    boxes = {entry.name: [tuple((0, length) for length in entry.full_shape)] for entry in manifest.tensors}
    assert places_of(manifest, boxes) == list(places(manifest))


def test_slices_of_huge_tensors_take_no_time_or_memory_of_their_size() -> None:
    from ebbtide.weights.geometry import _before

    shape = (1 << 20, 1 << 20)
    count = _before(np.array([0, 5 << 20, 1 << 40]), shape, ((10, 20), (3, 4)))
    assert count.tolist() == [0, 0, 10]


@pytest.mark.parametrize("box", [((0, 14), (0, 11)), ((0, 13),), ((3, 2), (0, 1)), ((-1, 2), (0, 1))])
def test_slices_outside_are_refused(box: Box) -> None:
    with pytest.raises(InvalidRequest, match="brain"):
        places_of(chain(1)[0].manifest, {"brain": [box]})
    with pytest.raises(InvalidRequest, match="absent"):
        places_of(chain(1)[0].manifest, {"absent": [box]})
