"""Patches of tensor pieces: any dtype, tile by tile, checked whole before the first byte is written."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.weights import describe, named_tensor
from ebbtide.weights.dtypes import CARRIERS
from ebbtide.weights.patch.layout import TILE_HEAD
from ebbtide.weights.patch.tensor import (
    apply_patch,
    check_result,
    compose_patches,
    encode_patch,
    install_patch,
    read_patch,
)
from tests.unit.weights.patch.changes import changed, units


def patch_of(dtype: str, base: bytes, new: bytes, tile_bytes: int = 4096) -> bytes:
    return b"".join(encode_patch(dtype, base, new, tile_bytes))


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("elements", [0, 1, 1000, 12_345])
def test_tensors_of_every_dtype_are_patched_exactly(dtype: str, elements: int) -> None:
    itemsize = CARRIERS[dtype].itemsize
    width = min(itemsize, 4)
    base = units(width, elements * itemsize // width)
    for density in (0, 0.02, 1):
        new, found = changed(base, density).tobytes(), bytearray(base.tobytes())
        apply_patch(read_patch(patch_of(dtype, base.tobytes(), new), dtype, elements), found)
        assert found == new


def test_a_patch_is_made_of_tiles_that_stand_for_themselves() -> None:
    base, new = units(2, 5000).tobytes(), changed(units(2, 5000), 0.05).tobytes()
    parts = list(encode_patch("BF16", base, new, 4096))
    patch = read_patch(b"".join(parts), "BF16", 5000)
    assert [bytes(tile) for tile in patch.tiles] == parts[1:]
    codec, found = patch.codec(), np.frombuffer(bytearray(base), "<u2")
    for tile, part in reversed(list(zip(patch.tiles, patch.head.slices(), strict=True))):
        codec.apply(tile, found[part])
    assert found.tobytes() == new


def test_threads_with_a_codec_each_give_the_patch_of_one() -> None:
    base, new = units(2, 400_000), changed(units(2, 400_000), 0.03)
    parts = [slice(start, start + 100_000) for start in range(0, 400_000, 100_000)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: patch_of("BF16", base[part].tobytes(), new[part].tobytes()), parts))
    assert found == [patch_of("BF16", base[part].tobytes(), new[part].tobytes()) for part in parts]


def test_nothing_is_written_if_the_last_tile_is_broken() -> None:
    base, new = units(2, 9000).tobytes(), changed(units(2, 9000), 0.05).tobytes()
    data = bytearray(patch_of("BF16", base, new))
    patch, found = read_patch(data, "BF16", 9000), bytearray(base)
    at = len(data) - len(patch.tiles[-1]) + TILE_HEAD.size  # its number of changes
    del patch
    data[at] ^= 1
    with pytest.raises(InvalidRequest):
        apply_patch(read_patch(data, "BF16", 9000), found)
    assert found == base
    with pytest.raises(InvalidRequest):
        install_patch(read_patch(data, "BF16", 9000), found)
    assert found[-808:] == base[-808:]  # a tile at a time, all or nothing


def test_digests_of_base_and_result_are_compared_before_anything_is_written() -> None:
    base, new = units(2, 9000), changed(units(2, 9000), 0.05)
    before = describe(named_tensor("w", base, dtype="BF16"), 4096).digests
    after = describe(named_tensor("w", new, dtype="BF16"), 4096).digests
    patch = read_patch(patch_of("BF16", base.tobytes(), new.tobytes()), "BF16", 9000)
    check_result(patch, base.tobytes(), before, after)
    with pytest.raises(ChunkCorrupt):
        check_result(patch, changed(base, 0.001, 5).tobytes(), before, after)
    with pytest.raises(ChunkCorrupt):
        check_result(patch, base.tobytes(), before, before)
    other = read_patch(patch_of("BF16", base.tobytes(), changed(base, 0.05, 9).tobytes()), "BF16", 9000)
    with pytest.raises(ChunkCorrupt):
        check_result(other, base.tobytes(), before, after)
    for short in (before[1:], ()):
        with pytest.raises(InvalidRequest, match="digests"):
            check_result(patch, base.tobytes(), short, after)


def test_pieces_that_do_not_fit_are_refused() -> None:
    base = units(2, 1000).tobytes()
    with pytest.raises(InvalidRequest, match="new"):
        list(encode_patch("BF16", base, base[:-2]))
    with pytest.raises(InvalidRequest, match="new"):
        list(encode_patch("F32", base[:-2], base[:-2]))
    with pytest.raises(InvalidRequest, match="tile_bytes"):
        list(encode_patch("F32", base, base, 1023))
    with pytest.raises(InvalidRequest, match="C64"):
        list(encode_patch("C64", base, base))
    data = patch_of("BF16", base, base)
    for dtype, elements in (("F16", 1000), ("BF16", 999), ("F32", 500)):
        with pytest.raises(InvalidRequest, match="is for 1000 elements"):
            read_patch(data, dtype, elements)
    with pytest.raises(InvalidRequest, match="into"):
        apply_patch(read_patch(data, "BF16", 1000), bytearray(1998))
    with pytest.raises(InvalidRequest, match="into"):
        apply_patch(read_patch(patch_of("BF16", base, bytes(2000)), "BF16", 1000), memoryview(base))


def test_memory_is_counted_in_bytes_whatever_its_view() -> None:
    base, new = units(2, 5000), changed(units(2, 5000), 0.05)
    data = b"".join(encode_patch("BF16", base.data, new.data, 4096))
    assert data == patch_of("BF16", base.tobytes(), new.tobytes())
    apply_patch(read_patch(data, "BF16", 5000), base.data)
    assert np.array_equal(base, new)
    with pytest.raises(InvalidRequest, match="gaps"):
        list(encode_patch("BF16", base.data[::2], new.data[::2]))


def test_encoding_composing_and_applying_hold_a_few_tiles_and_not_the_tensor() -> None:
    base, new = units(2, 8 << 20), changed(units(2, 8 << 20), 0.001)
    old, young = base.data.cast("B"), new.data.cast("B")
    data = b"".join(encode_patch("BF16", old, young))  # numba's compiling is not what is measured
    patch = read_patch(data, "BF16", len(base))
    apply_patch(patch, old)
    apply_patch(patch, old)
    tracemalloc.start()
    try:
        for _ in encode_patch("BF16", old, young):
            pass
        for _ in compose_patches([patch, patch]):
            pass
        apply_patch(patch, old)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
