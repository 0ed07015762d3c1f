"""What a publisher makes of a version: decoded again, it is the version, tile for tile, whatever changed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.weights import Patch, PolicyVersion
from ebbtide.weights import NamedTensor, check_patch, describe, patched_tiles, seal_manifest, seal_patch, slice_tiles
from ebbtide.weights.patch import TileCodec
from ebbtide.weights.tensors import CARRIERS, unit_width
from ebbtide.weights.version_encoding import (
    Described,
    Encoded,
    Encoding,
    Found,
    apply_found,
    encode_version,
    same_pieces,
)
from tests.unit.weights.chain import TILE, chain
from tests.unit.weights.patch.changes import changed, units

SMALL = 4096


def tensor(name: str, dtype: str, data: np.ndarray, **piece: tuple[int, ...]) -> NamedTensor:
    flat = data.view(np.uint8)
    shape = piece.pop("shape", (flat.nbytes // CARRIERS[dtype].itemsize,))
    return NamedTensor(name=name, dtype=dtype, shape=shape, data=flat.data, **piece)


def described(tensors: Sequence[NamedTensor], tile_bytes: int = SMALL) -> Described:
    return Described(tuple(tensors), tuple(describe(one, tile_bytes) for one in tensors))


def decoded(encoding: Encoding, base: Described, tile_bytes: int = SMALL) -> list[bytes]:
    """The version that somebody makes who has the base and fetches the blobs."""
    found = []
    result = encoding.result()
    for old, entry, patch in zip(base.tensors, result.entries, result.patches, strict=True):
        tiles = [bytearray(tile) for tile in slice_tiles(old, tile_bytes)]
        width = unit_width(entry.dtype)
        codec = TileCodec(width, tile_bytes)
        for index, size, digest in patched_tiles(patch):
            blob = encoding.blob(digest)
            assert len(blob) == size
            if size == len(tiles[index]):
                tiles[index][:] = blob
            else:
                codec.apply(blob, np.frombuffer(tiles[index], f"<u{width}"))
        found.append(b"".join(bytes(tile) for tile in tiles))
    return found


def check(result: Encoded, base: Described, tile_bytes: int = SMALL) -> Patch:
    """The result as a sealed manifest and patch, which are what a relay would take."""
    first = seal_manifest("run", PolicyVersion(policy="policy", version=1), base.entries, tile_bytes)
    manifest = seal_manifest("run", PolicyVersion(policy="policy", version=2), result.entries, tile_bytes)
    patch = Patch(
        run_id="run",
        base=first.version,
        version=manifest.version,
        tensors=result.patches,
        changed=result.changed,
        elements=result.elements,
    )
    check_patch(seal_patch(patch), manifest)
    return patch


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("elements", [0, 1, 700, 9001])
def test_every_dtype_is_encoded_exactly_and_its_changes_are_counted(dtype: str, elements: int) -> None:
    itemsize = CARRIERS[dtype].itemsize
    before = units(unit_width(dtype), elements * itemsize // unit_width(dtype))
    for density in (0.0, 0.01, 0.3, 1.0):
        after = changed(before, density, most=1)
        base = described([tensor("w", dtype, before)])
        encoding = encode_version([tensor("w", dtype, after)], base, tile_bytes=SMALL)
        assert decoded(encoding, base) == [after.tobytes()]
        result = encoding.result()
        assert result.entries == described([tensor("w", dtype, after)]).entries
        different = before.view(f"<u{itemsize}") != after.view(f"<u{itemsize}")
        assert (result.changed, result.elements) == (int(np.count_nonzero(different)), elements)


def test_pieces_scalars_and_empty_tensors_are_encoded_as_they_stand() -> None:
    for old, new in zip(chain(4, seed=3), chain(4, seed=3)[1:], strict=False):
        base = described(old.tensors, TILE)
        encoding = encode_version(new.tensors, base, tile_bytes=TILE)
        assert decoded(encoding, base, TILE) == [bytes(one.data) for one in new.tensors]
        assert encoding.result().entries == new.manifest.tensors
        check(encoding.result(), base, TILE)


def test_a_tile_that_did_not_change_costs_nothing_and_one_that_changed_altogether_is_dense() -> None:
    before = units(2, 3 * SMALL // 2)
    after = before.copy()
    after[SMALL // 2 : SMALL] = units(2, SMALL // 2, seed=5)
    after[-1] += 1
    base = described([tensor("w", "BF16", before)])
    encoding = encode_version([tensor("w", "BF16", after)], base, tile_bytes=SMALL)
    result = encoding.result()
    (patch,), (entry,) = result.patches, result.entries
    same, dense, little = patch.sizes
    assert (same, dense) == (0, SMALL)
    assert 0 < little < 64
    assert patch.digests[0] == entry.digests[1]
    assert entry.digests[0] == base.entries[0].digests[0]
    assert encoding.blob(patch.digests[0]) == after.tobytes()[SMALL : 2 * SMALL]
    check(result, base)


def test_no_blob_is_larger_than_its_dense_tile() -> None:
    for density in (0.0, 0.001, 0.1, 0.5, 1.0):
        for seed in range(3):
            before = units(2, 6000, seed)
            base = described([tensor("w", "BF16", before)], 128)
            result = encode_version(
                [tensor("w", "BF16", changed(before, density, seed))], base, tile_bytes=128
            ).result()
            assert all(size <= 128 for size in result.patches[0].sizes)
            check(result, base, 128)


def test_what_was_not_kept_is_made_again_with_the_same_bytes() -> None:
    before = units(2, 20_000)
    base, after = described([tensor("w", "BF16", before)]), [tensor("w", "BF16", changed(before, 0.05))]
    keeping = encode_version(after, base, tile_bytes=SMALL, keep_bytes=1 << 20)
    some = encode_version(after, base, tile_bytes=SMALL, keep_bytes=600)
    none = encode_version(after, base, tile_bytes=SMALL)
    assert keeping.result() == some.result() == none.result()
    for digest in keeping.result().patches[0].digests:
        assert keeping.blob(digest) == some.blob(digest) == none.blob(digest)
    assert 0 < sum(map(len, some._kept.values())) <= 600
    assert not none._kept


def test_dense_tiles_can_be_had_also_where_patches_were_made() -> None:
    before = units(2, 5000)
    new = tensor("w", "BF16", changed(before, 0.05))
    encoding = encode_version([new], described([tensor("w", "BF16", before)]), tile_bytes=SMALL)
    (entry,) = encoding.result().entries
    assert b"".join(bytes(encoding.blob(digest)) for digest in entry.digests) == bytes(new.data)
    assert not encoding.has(bytes(32))
    with pytest.raises(NotFound, match="no blob"):
        encoding.blob(bytes(32))


def test_without_a_base_everything_is_dense() -> None:
    tensors = chain(1)[0].tensors
    result = encode_version(tensors, tile_bytes=TILE).result()
    assert result.entries == described(tensors, TILE).entries
    assert [patch.digests for patch in result.patches] == [entry.digests for entry in result.entries]
    assert sum(sum(patch.sizes) for patch in result.patches) == sum(entry.size for entry in result.entries)
    assert result.changed == result.elements


def test_threads_that_share_the_work_give_what_one_gives() -> None:
    before = [units(2, 30_000, seed) for seed in range(6)]
    base = described([tensor(f"w{i}", "BF16", one) for i, one in enumerate(before)])
    after = [tensor(f"w{i}", "BF16", changed(one, 0.03 * i, i)) for i, one in enumerate(before)]
    encoding = Encoding(after, base, tile_bytes=SMALL)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(encoding.work) for _ in range(4)]:
            done.result()
    assert encoding.result() == encode_version(after, base, tile_bytes=SMALL).result()


def looked_for(before: np.ndarray, after: np.ndarray, whole: float) -> Found:
    """The changes of each tile, or None where more than this share of it changed."""
    size, found = SMALL // before.itemsize, []
    for start in range(0, len(before), size):
        old, new = before[start : start + size], after[start : start + size]
        positions = np.flatnonzero(old != new).astype(np.uint32)
        known = len(positions) <= whole * len(old)
        found.append((positions, new[positions] - old[positions]) if known else None)
    return found


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "F8_E4M3"])
@pytest.mark.parametrize("whole", [0.0, 0.3, 1.0])
def test_changes_that_were_found_elsewhere_make_the_version_and_the_same_blobs(dtype: str, whole: float) -> None:
    before = units(unit_width(dtype), 20_000)
    densities = [0.0, 0.01, 0.2, 0.6, 1.0]
    after = np.concatenate([changed(one, at, most=1) for one, at in zip(np.split(before, 5), densities, strict=True)])
    found = looked_for(before, after, whole)
    copy = after.copy()
    for number, changes in enumerate(found):  # what is known is made, and the rest is there already
        if changes is not None:
            copy.view(np.uint8)[number * SMALL : (number + 1) * SMALL] = 0
    apply_found(found, before.view(np.uint8), copy.view(np.uint8), SMALL)
    assert copy.tobytes() == after.tobytes()
    old, new = tensor("w", dtype, before), tensor("w", dtype, after)
    base = described([old, old])
    encoding = Encoding([new, new], base, tile_bytes=SMALL, found=[found, None])
    encoding.work()
    assert decoded(encoding, base) == [after.tobytes()] * 2
    assert encoding.result() == encode_version([new, new], base, tile_bytes=SMALL).result()


def test_encoding_that_is_stopped_gives_no_result() -> None:
    encoding = Encoding([tensor("w", "BF16", units(2, 5000))], tile_bytes=SMALL)
    encoding.stop()
    encoding.work()
    with pytest.raises(InvalidRequest, match="not encoded"):
        encoding.result()


def test_tensors_that_are_not_those_of_the_base_are_refused_by_name() -> None:
    before = tensor("w", "BF16", units(2, 100))
    base = described([before])
    replace = msgspec.structs.replace
    for other in (
        replace(before, name="v"),
        replace(before, dtype="F16"),
        replace(before, shape=(10, 10)),
        replace(before, start=(0,), full=(200,)),
    ):
        assert not same_pieces([other], base.entries)
        with pytest.raises(InvalidRequest, match="differs from the base") as caught:
            Encoding([other], base, tile_bytes=SMALL)
        assert caught.value.field == other.name
    with pytest.raises(InvalidRequest, match="are not the 1 of the base"):
        Encoding([before, before], base, tile_bytes=SMALL)
    assert same_pieces([before], base.entries)


def test_bytes_that_do_not_fill_a_shape_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="do not fill") as caught:
        Encoding([tensor("w", "BF16", units(2, 7), shape=(8,))])
    assert caught.value.field == "w"
