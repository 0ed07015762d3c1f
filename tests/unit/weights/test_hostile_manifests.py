"""Manifests made to harm: each is refused by name, before anything is allocated for it."""

import tracemalloc
from typing import Any

import msgspec
import pytest

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.types.weights import Manifest, PolicyVersion, TensorEntry
from ebbtide.weights import ManifestJoiner, ManifestLimits, ManifestPart, check_manifest, root_digest

D = bytes(32)


def entry(**changes: Any) -> TensorEntry:
    return TensorEntry(**{"name": "w", "dtype": "U8", "shape": (4,), "size": 4, "digests": (D,), **changes})


def sealed(*tensors: TensorEntry, **changes: Any) -> Manifest:
    """A manifest whose root is right, whatever else is wrong (but for numbers that no root can hold)."""
    version = PolicyVersion(policy="policy", version=2, parent=1, root=D)
    manifest = Manifest(**{"run_id": "run", "version": version, "tile_bytes": 16, "tensors": tensors, **changes})
    countable = all(length >= 0 for tensor in tensors for length in tensor.shape)
    root = root_digest(manifest) if manifest.version.root and countable else manifest.version.root
    return msgspec.structs.replace(manifest, version=msgspec.structs.replace(manifest.version, root=root))


TIB = 1 << 40
HOSTILE = {
    "a size bomb": sealed(entry(shape=(3 * TIB,), size=3 * TIB), tile_bytes=1 << 20),
    "a size beyond every limit": sealed(entry(shape=(1 << 62, 1 << 62), size=1 << 63)),
    "many bombs": sealed(*(entry(name=f"w{i}", shape=(TIB,), size=TIB) for i in range(9))),
    "fewer bytes than the shape": sealed(entry(size=3)),
    "a dimension below zero": sealed(entry(shape=(-1, -4))),
    "too many dimensions": sealed(entry(shape=(1,) * 17, size=1)),
    "too few tiles": sealed(entry(shape=(33,), size=33, digests=(D, D))),
    "too many tiles": sealed(entry(digests=(D, D))),
    "a tile for an empty tensor": sealed(entry(shape=(0,), size=0)),
    "a short digest": sealed(entry(digests=(D[:31],))),
    "one tile of two sizes": sealed(entry(), entry(name="v", shape=(5,), size=5)),
    "a name twice": sealed(entry(), entry()),
    "a name that climbs": sealed(entry(name="../x")),
    "a name with a climb inside": sealed(entry(name="a..b")),
    "a hidden name": sealed(entry(name=".x")),
    "a name with a slash": sealed(entry(name="a/b")),
    "a name with a zero byte": sealed(entry(name="a\0b")),
    "a name with a line break": sealed(entry(name="a\n")),
    "the name of what is no tensor in a file": sealed(entry(name="__metadata__")),
    "no name": sealed(entry(name="")),
    "a long name": sealed(entry(name="x" * 513)),
    "an unknown dtype": sealed(entry(dtype="F128")),
    "no tensors": sealed(),
    "a piece beyond its tensor": sealed(entry(start=(1,), full=(4,))),
    "a piece of another rank": sealed(entry(start=(0, 0), full=(4, 1))),
    "a piece without its tensor": sealed(entry(start=(0,))),
    "an empty piece": sealed(entry(shape=(0,), size=0, digests=(), start=(0,), full=(4,))),
    "a piece of a bomb": sealed(entry(start=(0,), full=(5 * TIB,))),
    "pieces with a gap": sealed(entry(start=(0,), full=(9,)), entry(start=(5,), full=(9,))),
    "pieces that overlap": sealed(entry(start=(0,), full=(8,)), entry(start=(3,), full=(8,))),
    "a piece twice": sealed(entry(start=(0,), full=(8,)), entry(start=(0,), full=(8,))),
    "the whole twice as pieces": sealed(entry(start=(0,), full=(4,)), entry(start=(0,), full=(4,))),
    "pieces cut along many dimensions": sealed(entry(shape=(1,) * 16, size=1, start=(0,) * 16, full=(2,) * 16)),
    "pieces of two tensors": sealed(entry(start=(0,), full=(8,)), entry(start=(4,), full=(9,))),
    "pieces of two dtypes": sealed(entry(start=(0,), full=(8,)), entry(dtype="I8", start=(4,), full=(8,))),
    "a piece beside the whole": sealed(entry(), entry(start=(0,), full=(4,))),
    "pieces apart": sealed(entry(start=(0,), full=(8,)), entry(name="v"), entry(start=(4,), full=(8,))),
    "tiles of no bytes": sealed(entry(), tile_bytes=0),
    "tiles beyond a message": sealed(entry(), tile_bytes=(1 << 20) + 1),
    "a run that climbs": sealed(entry(), run_id=".."),
    "version 0": sealed(entry(), version=PolicyVersion(policy="policy", version=0, root=D)),
    "its own parent": sealed(entry(), version=PolicyVersion(policy="policy", version=2, parent=2, root=D)),
    "a policy with a slash": sealed(entry(), version=PolicyVersion(policy="a/b", version=2, root=D)),
    "no root": sealed(entry(), version=PolicyVersion(policy="policy", version=2)),
}


@pytest.mark.parametrize("manifest", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused_before_allocation(manifest: Manifest) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refusal:
            check_manifest(manifest)
        assert tracemalloc.get_traced_memory()[1] < 256 << 10
    finally:
        tracemalloc.stop()
    assert refusal.value.field


def test_the_sound_form_of_these_is_accepted() -> None:
    check_manifest(sealed(entry(), entry(name="v", shape=(2, 2))))
    check_manifest(sealed(entry(start=(4,), full=(8,)), entry(start=(0,), full=(8,)), entry(name="v")))


def test_limits_are_kept_while_parts_arrive() -> None:
    head = ManifestPart(run_id="run", version=PolicyVersion(policy="p", version=1, root=D), tile_bytes=16)
    tensors = tuple(entry(name=f"w{i}") for i in range(8))
    for limits in (ManifestLimits(tensors=7), ManifestLimits(bytes=31), ManifestLimits(tiles=7)):
        joiner = ManifestJoiner(limits)
        joiner.add(head)
        with pytest.raises(InvalidRequest, match="more than"):
            joiner.add(ManifestPart(tensors=tensors))


def test_parts_out_of_order_are_refused() -> None:
    head = ManifestPart(run_id="run", version=PolicyVersion(policy="p", version=1, root=D), tile_bytes=16)
    joiner = ManifestJoiner()
    with pytest.raises(EbbtideError):
        joiner.add(ManifestPart(tensors=(entry(),)))
    joiner.add(head)
    with pytest.raises(EbbtideError):
        joiner.add(head)
    with pytest.raises(EbbtideError):
        ManifestJoiner().join()
