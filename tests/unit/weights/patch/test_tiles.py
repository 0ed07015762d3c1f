"""A tile patch is exact, the same from all kernels, and no larger than what else there is."""

import subprocess
import sys
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import zstandard

from ebbtide.errors import InvalidRequest
from ebbtide.weights.patch import TILE_HEAD, Kind, TileCodec
from tests.unit.weights.patch.changes import changed, pairs, specials, units

Codecs = Callable[[int], TileCodec]


def kind(patch: bytes) -> Kind:
    return Kind(patch[1])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_change_comes_out_as_it_went_in(codec_of: Codecs, width: int) -> None:
    codec = codec_of(width)
    for name, base, new in chain(pairs(width), (pair for pair in specials() if pair[1].itemsize == width)):
        patch = codec.encode(base, new)
        codec.check(patch, len(base))
        found = base.copy()
        codec.apply(patch, found)
        assert np.array_equal(found, new), name
        assert (kind(patch) == Kind.SAME) == np.array_equal(base, new), name


@pytest.mark.parametrize("width", [1, 2, 4])
def test_compiled_kernels_give_the_bytes_of_the_plain_ones(width: int) -> None:
    pytest.importorskip("numba")
    plain, compiled = TileCodec(width, compiled=False), TileCodec(width, compiled=True)
    for name, base, new in pairs(width):
        assert plain.encode(base, new) == compiled.encode(base, new), name


def test_a_full_tile_of_each_width_is_exact_at_any_density(codec_of: Codecs) -> None:
    for width in (1, 2, 4):
        codec, base = codec_of(width), units(width, (1 << 20) // width)
        for new in (changed(base, 0.02), units(width, len(base), 1), changed(base, 1e-5)):
            found = base.copy()
            codec.apply(codec.encode(base, new), found)
            assert np.array_equal(found, new)


def test_changes_found_elsewhere_make_the_patch_of_the_whole_tile(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, 5000)
    new = changed(base, 0.03)
    positions = np.flatnonzero(base != new)
    differences = (new - base)[positions]
    assert codec.encode_changes(positions, differences, 5000) == codec.encode(base, new)
    assert codec.encode_changes(positions[:0], differences[:0], 5000) == codec.encode(base, base)
    zeros = np.setdiff1d(np.arange(5000), positions)[:40]  # differences of nothing do no harm
    order = np.argsort(both := np.concatenate([positions, zeros]))
    some = np.concatenate([differences, np.zeros(40, base.dtype)])[order]
    assert codec.encode_changes(both[order].astype("u4"), some, 5000) == codec.encode(base, new)
    for wrong in (positions[::-1], positions + 5000, positions - 5000, positions[1:], positions * 0):
        with pytest.raises(InvalidRequest, match="positions"):
            codec.encode_changes(wrong, differences, 5000)


def test_changes_that_another_kind_may_tell_in_fewer_bytes_are_left_to_the_whole_tile(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, 5000)
    for new in (base ^ 8, units(2, 5000, 3)):
        positions = np.flatnonzero(base != new)
        assert codec.encode_changes(positions, (new - base)[positions], 5000) is None


def test_unaligned_and_read_only_memory_is_read(codec_of: Codecs) -> None:
    base, new = units(4, 300), changed(units(4, 300), 0.1)
    shifted = np.frombuffer(b"x" + base.tobytes(), "u1")[1:].view("<u4")
    codec, found = codec_of(4), base.copy()
    codec.apply(codec.encode(shifted, np.frombuffer(new.tobytes(), "<u4")), found)
    assert np.array_equal(found, new)
    buffer = bytearray(b"x" + base.tobytes())
    codec.apply(codec.encode(base, new), np.frombuffer(memoryview(buffer)[1:], "<u4"))
    assert buffer[1:] == new.tobytes()


def test_what_is_not_a_tile_is_refused(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, 100)
    patch = codec.encode(base, changed(base, 0.5))
    for wrong in (base.view("u1"), base.reshape(10, 10), base[::2], units(2, (1 << 19) + 1)):
        with pytest.raises(InvalidRequest):
            codec.apply(patch, wrong)
    with pytest.raises(InvalidRequest, match="new"):
        codec.encode(base, base[:99])
    with pytest.raises(InvalidRequest, match="written"):
        codec.apply(patch, np.frombuffer(base.tobytes(), "<u2"))


def xor_and_zstd(base: np.ndarray, new: np.ndarray) -> int:
    return min(len(zstandard.ZstdCompressor(level=level).compress((base ^ new).data)) for level in (1, 3))


def entropy(histogram: np.ndarray) -> float:
    counts = histogram[histogram > 0].astype(float)
    return float(-(counts * np.log2(counts / counts.sum())).sum()) / 8


@pytest.mark.parametrize("density", [0.005, 0.02, 0.05])
def test_small_steps_come_within_a_tenth_of_their_entropy(density: float) -> None:
    base = units(2, 1 << 19)
    new = changed(base, density, most=2)
    changes = np.count_nonzero(base != new)
    bound = entropy(np.bincount((new - base)[base != new])) + entropy(np.array([changes, len(base) - changes]))
    size = len(TileCodec(2).encode(base, new))
    assert size <= 1.1 * bound
    assert size * 1.8 <= xor_and_zstd(base, new)
    assert size * 6 <= changes * 10


def regular(base: np.ndarray) -> dict[str, np.ndarray]:
    column, rows = np.arange(len(base)) % 64 == 5, np.arange(len(base)) // 1024 % 8 == 0
    return {
        "one column": base + column,
        "one column to anything": np.where(column, units(2, len(base), 5), base),
        "some rows to zero": np.where(rows, 0, base),
        "some rows to anything": np.where(rows, units(2, len(base), 6), base),
        "a bit of all": base ^ 8,
        "a bit of one column": np.where(column, base ^ 8, base),
        "all to one value": np.full_like(base, 7),
        "all moved by one place": np.roll(base, 1),
        "two of four to zero": np.where(np.random.default_rng(2).random(len(base)) < 0.5, 0, base),
        "the second half again": np.where(np.arange(len(base)) < len(base) // 2, base, units(2, len(base), 8)),
    }


def test_no_patch_is_larger_than_the_best_of_the_others() -> None:
    codec, base = TileCodec(2), units(2, 1 << 18)
    news = {f"{density} changed": changed(base, density) for density in (0.001, 0.01, 0.1, 0.2, 0.4, 0.7, 0.95, 1.0)}
    for name, new in {**news, **regular(base), "random": units(2, len(base), 9)}.items():
        rest = min(new.nbytes, xor_and_zstd(base, new.astype(base.dtype)))
        size = len(codec.encode(base, new.astype(base.dtype)))
        assert size - TILE_HEAD.size <= 1.01 * rest + 16, (name, size, rest)


def test_without_numba_the_plain_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.weights.patch.find_spec", lambda name: None)
    assert TileCodec(2)._kernels.__name__ == "ebbtide.weights.numpy_kernels"


def test_numba_is_imported_for_the_first_codec_and_not_before() -> None:
    code = "import sys, ebbtide.weights.patch; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
