"""Tensors of any dtype, patched tile by tile: by several threads, from any view of memory, and in little of it."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.weights.patch import TILE_HEAD, TileCodec
from ebbtide.weights.tensors import CARRIERS, unit_width
from tests.unit.weights.patch.changes import Array, changed, units

STRIDE = 2048
"""Units of a tile here."""


def tiles_of(array: Array) -> list[Array]:
    return [array[start : start + STRIDE] for start in range(0, len(array), STRIDE)]


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("elements", [1, 1000, 12_345])
def test_tensors_of_every_dtype_are_patched_exactly(dtype: str, elements: int) -> None:
    itemsize, width = CARRIERS[dtype].itemsize, unit_width(dtype)
    base, codec = units(width, elements * itemsize // width), TileCodec(width)
    for density in (0, 0.02, 1):
        new, found = changed(base, density), base.copy()
        for old, young, target in zip(tiles_of(base), tiles_of(new), tiles_of(found), strict=True):
            codec.apply(codec.encode(old, young), target)
        assert np.array_equal(found, new)


def test_threads_with_a_codec_each_give_the_patches_of_one() -> None:
    base, new = units(2, 400_000), changed(units(2, 400_000), 0.03)
    pairs = list(zip(tiles_of(base), tiles_of(new), strict=True))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: TileCodec(2).encode(*pair), pairs))
    assert found == list(starmap(TileCodec(2).encode, pairs))


def test_nothing_is_written_of_a_tile_whose_patch_is_broken() -> None:
    base, codec = units(2, 9000), TileCodec(2)
    data, found = bytearray(codec.encode(base, changed(base, 0.05))), base.copy()
    data[TILE_HEAD.size] ^= 1  # its number of changes
    with pytest.raises(InvalidRequest):
        codec.check(data, 9000)
    with pytest.raises(InvalidRequest):
        codec.apply(data, found)
    assert np.array_equal(found, base)


def test_encoding_composing_and_applying_hold_a_few_tiles_and_not_the_tensor() -> None:
    base, new = units(2, 8 << 20), changed(units(2, 8 << 20), 0.001)
    codec, stride = TileCodec(2), 1 << 19
    codec.apply(codec.encode(base[:99], new[:99]), base[:99].copy())  # numba's compiling is not what is measured
    tracemalloc.start()
    try:
        for start in range(0, len(base), stride):
            old, young = base[start : start + stride], new[start : start + stride]
            patch = codec.encode(old, young)
            codec.compose([patch, patch], stride)
            codec.apply(patch, old)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(base, new)
    assert peak < 4 << 20
