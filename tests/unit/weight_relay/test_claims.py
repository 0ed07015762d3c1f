"""What one run's stage says of a blob keeps no other run's from being taken."""

from pathlib import Path

import msgspec
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.weights import Manifest, Patch, TensorPatch
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import seal_manifest, seal_patch
from tests.integration.weight_relay.lines import SIGNER, Line, Version
from tests.unit.weight_relay.relays import SMALL, relay_at

WITHIN = 1000  # elements less, so that the one tile has another size


def resealed(manifest: Manifest, digests: dict[str, tuple[bytes, ...]]) -> Manifest:
    """The manifest with other digests, signed."""
    entries = tuple(
        msgspec.structs.replace(entry, digests=digests.get(entry.name, entry.digests)) for entry in manifest.tensors
    )
    return SIGNER.sign(seal_manifest(manifest.run_id, manifest.version, entries, manifest.tile_bytes))


def wrong_size(victim: Version) -> Manifest:
    """A manifest of run "evil" that says of the victim's first tile that it is smaller."""
    sizes = {name: (dtype, kind, count - WITHIN) for name, (dtype, kind, count) in SMALL.items()}
    evil = Line(1, sizes=sizes, run_id="evil")[1].manifest
    entry = victim.manifest.tensors[0]
    return resealed(evil, {entry.name: entry.digests})


def as_patch(line: Line, data: bytes, digest: bytes) -> Patch:
    """A patch to the line's second version that says of a blob that it is a tile patch."""
    patch = line[2].patch
    assert patch is not None
    first = TensorPatch(sizes=(len(data),), digests=(digest,))
    return SIGNER.sign_patch(seal_patch(msgspec.structs.replace(patch, tensors=(first, *patch.tensors[1:]))))


async def opened(folder: Path) -> WeightRelay:
    relay = relay_at(folder, keep_versions=9)
    await relay.open()
    return relay


async def publish(relay: WeightRelay, version: Version) -> None:
    for digest in await relay.intake.begin(version.manifest):
        await relay.intake.put(digest, version.tiles[digest])
    await relay.intake.commit(version.manifest.run_id, version.manifest.version)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
async def test_a_tile_is_taken_though_another_run_says_that_it_has_another_size(tmp_path: Path, first: bool) -> None:
    relay, victim = await opened(tmp_path), Line(1, sizes=SMALL)[1]
    evil = wrong_size(victim)
    if first:
        await relay.intake.begin(evil)
    missing = await relay.intake.begin(victim.manifest)
    if not first:
        await relay.intake.begin(evil)
    for digest in missing:
        await relay.intake.put(digest, victim.tiles[digest])
    await relay.intake.commit("run", victim.manifest.version)
    for digest in missing:
        assert await relay.reader.tile(digest) == victim.tiles[digest]
    await relay.close()


async def test_who_says_that_a_tile_has_another_size_does_not_get_it(tmp_path: Path) -> None:
    relay, victim = await opened(tmp_path), Line(1, sizes=SMALL)[1]
    own = Line(1, sizes={name: (d, k, n - WITHIN) for name, (d, k, n) in SMALL.items()}, run_id="evil")[1]
    evil = wrong_size(victim)
    await relay.intake.begin(evil)
    (stolen,) = victim.manifest.tensors[0].digests
    with pytest.raises(InvalidRequest, match=r"tensors\.digests: .* bytes, not"):
        await relay.intake.put(stolen, victim.tiles[stolen])  # right by its digest, and nobody says so of its size
    await publish(relay, victim)
    (other,) = evil.tensors[1].digests
    await relay.intake.put(other, own.tiles[other])
    with pytest.raises(InvalidRequest, match=r"tensors\.digests: .* bytes, not"):
        await relay.intake.commit("evil", evil.version)
    assert relay.library.index.stream(("evil", "policy")) == {}
    await relay.close()


async def test_a_tile_is_taken_though_another_run_says_that_it_is_a_patch_and_that_one_does_not_get_it(
    tmp_path: Path,
) -> None:
    relay, evil = await opened(tmp_path), Line(2, sizes=SMALL, run_id="evil")
    tiny = {"w": ("BF16", "<u2", 50), "b": ("F32", "<u4", 30)}
    victim = Line(1, sizes=tiny, seed=9)[1]
    await publish(relay, evil[1])
    digest = victim.manifest.tensors[0].digests[0]
    patch = as_patch(evil, victim.tiles[digest], digest)
    missing = await relay.intake.begin(evil[2].manifest, patch)
    assert digest in missing
    with pytest.raises(InvalidRequest):
        await relay.intake.put(digest, victim.tiles[digest])
    await publish(relay, victim)
    for other in set(missing) - {digest}:
        await relay.intake.put(other, evil[2].blobs[other])
    with pytest.raises(InvalidRequest, match=r"patch\.digests: .*no patch of its tile"):
        await relay.intake.commit("evil", evil[2].manifest.version)
    await relay.close()


async def test_a_damaged_blob_is_taken_for_nobody(tmp_path: Path) -> None:
    relay, victim = await opened(tmp_path), Line(1, sizes=SMALL)[1]
    await relay.intake.begin(wrong_size(victim))
    for digest in await relay.intake.begin(victim.manifest):
        with pytest.raises(ChunkCorrupt, match="does not match its digest"):
            await relay.intake.put(digest, victim.tiles[digest][:-1])
        assert digest not in relay.library.index.on_disk
    await relay.close()
