"""Patches of several steps add up to the patch of them all, without dense weights."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.weights.patch import Kind, TileCodec, read_tile, write_tile
from tests.unit.weights.patch.changes import Array, changed, units

Codecs = Callable[[int], TileCodec]
LENGTH = 5000


def chain(codec: TileCodec, versions: Sequence[Array]) -> list[bytes]:
    return [codec.encode(old, new) for old, new in pairwise(versions)]


def applied(codec: TileCodec, patch: bytes, base: Array) -> Array:
    found = base.copy()
    codec.apply(patch, found)
    return found


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("density", [0.001, 0.03, 0.3])
def test_sparse_patches_compose_to_the_very_bytes_of_the_direct_one(
    codec_of: Codecs, width: int, density: float
) -> None:
    codec, versions = codec_of(width), [units(width, LENGTH)]
    for seed in range(5):
        versions.append(changed(versions[-1], density, seed))
    composed = codec.compose(chain(codec, versions), LENGTH)
    assert composed == codec.encode(versions[0], versions[-1])


def test_what_is_undone_vanishes(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, LENGTH)
    new = changed(base, 0.03)
    composed = codec.compose([codec.encode(base, new), codec.encode(new, base)], LENGTH)
    assert read_tile(composed, 2, LENGTH).kind == Kind.SAME
    third = changed(new, 0.01, 7)
    half = codec.compose([codec.encode(base, new), codec.encode(new, base), codec.encode(base, third)], LENGTH)
    assert half == codec.encode(base, third)


def of_kind(codec: TileCodec, kind: Kind, base: Array, seed: int) -> tuple[Array, bytes]:
    """A new tile, and a patch to it of the wanted kind."""
    match kind:
        case Kind.SAME:
            new = base.copy()
        case Kind.SPARSE:
            new = changed(base, 0.05, seed)
        case Kind.XOR:
            new = base ^ np.array(1 << seed % 8, base.dtype)
        case Kind.PACKED:
            new = np.full_like(base, seed % 200 + 1)
        case _:
            new = units(base.itemsize, len(base), seed + 100)
    patch = codec.encode(base, new)
    assert read_tile(patch, base.itemsize, len(base)).kind == kind
    return new, patch


@pytest.mark.parametrize("width", [1, 2, 4])
def test_chains_of_all_kinds_compose_to_what_they_do_one_after_another(codec_of: Codecs, width: int) -> None:
    codec, rng = codec_of(width), np.random.default_rng(3)
    kinds = [Kind.SAME, Kind.SPARSE, Kind.XOR, Kind.DENSE, Kind.PACKED]
    for _ in range(40):
        base = tile = units(width, LENGTH)
        patches = []
        for kind in rng.choice(kinds, rng.integers(1, 6), p=[0.1, 0.35, 0.35, 0.1, 0.1]):
            tile, patch = of_kind(codec, Kind(kind), tile, int(rng.integers(1000)))
            patches.append(patch)
        composed = codec.compose(patches, LENGTH)
        assert np.array_equal(applied(codec, composed, base), tile)
        again = codec.compose([composed, codec.encode(tile, base)], LENGTH)
        assert np.array_equal(applied(codec, again, base), base)


def test_a_series_is_kept_short_and_says_when_a_keyframe_is_due(codec_of: Codecs) -> None:
    codec, tile, patches = codec_of(2), units(2, LENGTH), []
    for step in range(9):
        for kind in (Kind.XOR, Kind.SPARSE):
            tile, patch = of_kind(codec, kind, tile, step)
            patches.append(patch)
    assert read_tile(codec.compose(patches[:16], LENGTH), 2, LENGTH).kind == Kind.SERIES
    with pytest.raises(InvalidRequest, match="keyframe"):
        codec.compose(patches, LENGTH)


def test_a_broken_patch_is_refused_wherever_it_stands(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, LENGTH)
    good, broken = codec.encode(base, units(2, LENGTH, 9)), write_tile(Kind.SPARSE, 2, LENGTH, b"\1" * 30)
    for chosen in ([broken], [broken, good], [good, broken]):
        with pytest.raises(InvalidRequest):
            codec.compose(chosen, LENGTH)
