"""Patches between versions: what they bind, and what is refused by name."""

import itertools
from collections.abc import Callable

import msgspec
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest, PermissionDenied
from ebbtide.types.weights import Manifest, Patch, TensorPatch
from ebbtide.weights import (
    PatchJoiner,
    Signer,
    blob_sizes,
    check_patch,
    check_patch_signature,
    check_signature,
    same_geometry,
    seal_patch,
    split_patch,
)
from tests.unit.weights.chain import Link, chain

replace = msgspec.structs.replace
D = bytes(32)


@pytest.fixture(scope="module")
def links() -> list[Link]:
    return chain(3, seed=1)


@pytest.fixture
def target(links: list[Link]) -> Manifest:
    return links[1].manifest


@pytest.fixture
def patch(links: list[Link]) -> Patch:
    assert links[1].patch
    return links[1].patch


def test_a_patch_between_neighbours_is_accepted(patch: Patch, target: Manifest, links: list[Link]) -> None:
    check_patch(patch, target)
    assert patch.size == sum(len(links[1].blobs[d]) * n for d, n in _uses(patch).items())
    assert blob_sizes(patch) == {digest: len(links[1].blobs[digest]) for digest in blob_sizes(patch)}
    assert same_geometry(links[0].manifest, target)


def _uses(patch: Patch) -> dict[bytes, int]:
    uses: dict[bytes, int] = {}
    for digest in itertools.chain.from_iterable(tensor.digests for tensor in patch.tensors):
        uses[digest] = uses.get(digest, 0) + 1
    return uses


def tensor(patch: Patch, index: int, change: Callable[[TensorPatch], TensorPatch]) -> Patch:
    tensors = list(patch.tensors)
    tensors[index] = change(tensors[index])
    return replace(patch, tensors=tuple(tensors))


REFUSED: dict[str, Callable[[Patch], Patch]] = {
    "of another run": lambda patch: replace(patch, run_id="other"),
    "to another version": lambda patch: replace(patch, version=replace(patch.version, step=9)),
    "from itself": lambda patch: replace(patch, base=patch.version),
    "from another policy": lambda patch: replace(patch, base=replace(patch.base, policy="other")),
    "a base without a root": lambda patch: replace(patch, base=replace(patch.base, root=b"")),
    "a tensor too few": lambda patch: replace(patch, tensors=patch.tensors[1:]),
    "more changes than elements": lambda patch: replace(patch, changed=1),
    "a tile too many": lambda patch: tensor(patch, 0, lambda it: replace(it, sizes=(*it.sizes, 0))),
    "a digest too many": lambda patch: tensor(patch, 0, lambda it: replace(it, digests=(*it.digests, D))),
    "a digest too few": lambda patch: tensor(patch, 0, lambda it: replace(it, digests=it.digests[1:])),
    "a short digest": lambda patch: tensor(patch, 0, lambda it: replace(it, digests=(D[:9], *it.digests[1:]))),
    "more than the tile": lambda patch: tensor(patch, 0, lambda it: replace(it, sizes=(1 << 20, *it.sizes[1:]))),
    "less than nothing": lambda patch: tensor(patch, 0, lambda it: replace(it, sizes=(-1, *it.sizes[1:]))),
    "a foreign dense tile": lambda patch: tensor(
        patch, 0, lambda it: replace(it, sizes=(64,) * len(it.sizes), digests=(D,) * len(it.sizes))
    ),
    "one tile patch of two sizes": lambda patch: tensor(
        patch, 0, lambda it: replace(it, sizes=tuple(range(1, len(it.sizes) + 1)), digests=(D,) * len(it.sizes))
    ),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_patch_that_is_not_one_is_refused_by_name(
    change: Callable[[Patch], Patch], patch: Patch, target: Manifest
) -> None:
    hostile = change(patch)
    if all(size >= 0 for item in hostile.tensors for size in item.sizes):
        hostile = seal_patch(hostile)
    with pytest.raises(InvalidRequest) as refusal:
        check_patch(hostile, target)
    assert refusal.value.field


def test_a_changed_field_does_not_match_the_root(patch: Patch, target: Manifest) -> None:
    with pytest.raises(ChunkCorrupt):
        check_patch(replace(patch, base=replace(patch.base, root=D)), target)
    with pytest.raises(ChunkCorrupt):
        check_patch(tensor(patch, 0, lambda it: replace(it, digests=(D, *it.digests[1:]))), target)


def test_parts_join_to_the_same_patch_and_hold_no_more_than_the_target(patch: Patch, target: Manifest) -> None:
    parts = list(split_patch(patch, part_bytes=300))
    assert len(parts) > 2
    joiner = PatchJoiner(target)
    for part in parts:
        joiner.add(part)
    assert joiner.join() == patch
    with pytest.raises(InvalidRequest, match="more tensors"):
        joiner.add(parts[-1])
    with pytest.raises(InvalidRequest, match="first part"):
        PatchJoiner(target).add(parts[1])


BOMBS: dict[str, Callable[[TensorPatch], TensorPatch]] = {
    "digests that no tile has": lambda it: replace(it, digests=(D,) * 100_000),
    "digests of any length": lambda it: replace(it, digests=(bytes(1 << 20), *it.digests[1:])),
    "tiles that the tensor has not": lambda it: replace(it, sizes=(0,) * 100_000),
    "tiles beyond their size": lambda it: replace(it, sizes=(1 << 40, *it.sizes[1:])),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_part_with_more_than_a_patch_of_its_tensor_is_refused_as_it_comes(
    bomb: Callable[[TensorPatch], TensorPatch], patch: Patch, target: Manifest
) -> None:
    (part,) = split_patch(tensor(patch, 0, bomb), part_bytes=1 << 30)
    with pytest.raises(InvalidRequest) as refusal:
        PatchJoiner(target).add(part)
    assert refusal.value.field == target.tensors[0].name


def test_only_the_publisher_of_the_run_can_sign(target: Manifest, patch: Patch) -> None:
    signer, other = Signer(b"1" * 32), Signer(b"2" * 32)
    signed = signer.sign(target)
    check_signature(signed)
    check_signature(signed, signer.public)
    for wrong in (
        target,
        replace(signed, signature=other.sign(target).signature),
        replace(signed, publisher=other.public),
    ):
        with pytest.raises(PermissionDenied):
            check_signature(wrong)
    with pytest.raises(PermissionDenied, match="another key"):
        check_signature(other.sign(target), signer.public)
    check_patch_signature(signer.sign_patch(patch), signer.public)
    with pytest.raises(PermissionDenied):
        check_patch_signature(other.sign_patch(patch), signer.public)
    with pytest.raises(PermissionDenied, match="not signed"):
        check_patch_signature(patch, signer.public)


def test_a_signature_of_a_manifest_is_none_of_a_patch(target: Manifest, patch: Patch) -> None:
    signer = Signer(b"1" * 32)
    with pytest.raises(PermissionDenied):
        check_patch_signature(replace(patch, signature=signer.sign(target).signature), signer.public)
