"""Versions come and go by patches, and whoever follows the relay's ways has them bit for bit."""

import signal
from typing import Any

import msgspec
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest, NotReady, PermissionDenied, VersionUnavailable
from ebbtide.weights import Signer, patch_root, seal_patch, tile_digest
from tests.integration.weight_relay.lines import SIGNER, SIZES, Line, Version
from tests.integration.weight_relay.reader import Reader, tiles_by_place
from tests.support.waiting import wait_until

SMALL = {"w": ("BF16", "<u2", 20_000), "b": ("F32", "<u4", 3_000)}


async def publish(wire: Any, version: Version) -> None:
    await wire.publish(version.manifest, version.blobs if version.patch else version.tiles, version.patch)


async def publish_all(wire: Any, line: Line) -> None:
    for version in line:
        await publish(wire, version)


async def test_who_holds_the_base_fetches_the_patch_alone(wire: Any) -> None:
    line = Line(2)
    await publish_all(wire, line)
    reader = Reader(wire)
    assert await reader.pull(2, line[1]) == tiles_by_place(line[2])
    assert reader.fetched == sum(map(len, line[2].blobs.values()))
    assert reader.fetched * 10 < sum(map(len, line[2].tiles.values()))


async def test_who_holds_nothing_gets_a_keyframe_and_what_leads_on(wire: Any) -> None:
    line = Line(3)
    await publish_all(wire, line)
    assert await Reader(wire).pull(3) == tiles_by_place(line[3])
    assert [(way.start, way.keyframe, way.via) for way in await wire.ways(3)] == [(1, True, (2, 3))]


async def test_a_chain_of_twenty_leads_from_each_version_to_the_newest(process: Any, wire: Any) -> None:
    process.end(signal.SIGTERM)
    await process.start("--keep-versions", "30", "--keyframe-every", "30", "--keyframe-share", "9")
    line = Line(21, sizes=SMALL)
    await publish_all(wire, line)
    for number in (1, 2, 11, 20):
        reader = Reader(wire)
        assert await reader.pull(21, line[number], bytes_per_s=1e12) == tiles_by_place(line[21])
    assert await Reader(wire).pull(5, line[9]) == tiles_by_place(line[5])  # back again, over the keyframe


async def test_a_composed_patch_does_what_its_chain_does_in_fewer_bytes(process: Any, wire: Any) -> None:
    process.end(signal.SIGTERM)
    await process.start("--keep-versions", "30", "--keyframe-every", "30", "--keyframe-share", "9")
    line = Line(8, share=0.2, sizes=SIZES)
    await publish_all(wire, line)
    by_chain, composed = Reader(wire), Reader(wire)
    assert await by_chain.pull(8, line[1], bytes_per_s=1e12) == tiles_by_place(line[8])
    assert [way.via for way in await wire.ways(8, [1], bytes_per_s=1e12)] == [tuple(range(2, 9))]
    assert await composed.pull(8, line[1], bytes_per_s=1e3) == tiles_by_place(line[8])
    assert [way.via for way in await wire.ways(8, [1])] == [(8,)]
    assert composed.fetched < 0.8 * by_chain.fetched
    assert not (await wire.patch(1, line[8].manifest)).signature
    process.end(signal.SIGKILL)
    await process.start("--keep-versions", "30", "--keyframe-every", "30", "--keyframe-share", "9")
    assert [way.via for way in await wire.ways(8, [1])] == [(8,)]


async def test_a_relay_makes_a_keyframe_of_a_long_way_by_itself(process: Any, wire: Any) -> None:
    process.end(signal.SIGTERM)
    await process.start("--keep-versions", "2", "--keyframe-every", "3")
    line = Line(5)
    for version in list(line)[:4]:
        await publish(wire, version)
    await wait_until(lambda: process.manifests()[-1].stem == "0000000004", what="the keyframe")

    async def direct() -> bool:
        reader = Reader(wire)
        assert await reader.pull(4) == tiles_by_place(line[4])
        return reader.fetched == sum(map(len, line[4].tiles.values()))

    await wait_until(direct, what="the keyframe being the way")
    await publish(wire, line[5])
    names = {digest.hex() for digest in [*line[4].tiles, *line[5].blobs]}
    await wait_until(lambda: process.tiles() == names, what="the end of what led there")
    for _ in range(2):
        assert await Reader(wire).pull(5) == tiles_by_place(line[5])
        process.end(signal.SIGKILL)
        await process.start("--keep-versions", "2", "--keyframe-every", "3")


async def test_the_graph_is_found_again_after_a_restart(process: Any, wire: Any) -> None:
    line = Line(4, sizes=SMALL)
    await publish_all(wire, line)
    before = await wire.ways(4, [2], scratch=True)
    for how in (signal.SIGKILL, signal.SIGTERM):
        process.end(how)
        await process.start()
        assert await wire.ways(4, [2], scratch=True) == before
        assert await Reader(wire).pull(4, line[2]) == tiles_by_place(line[4])
        assert await wire.patch(2, line[3].manifest) == line[3].patch


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_a_relay_killed_while_a_patch_comes_shows_nothing_of_it(
    sent: int, process: Any, wire: Any, tmp_path: Any
) -> None:
    line = Line(2)
    await publish(wire, line[1])
    missing = await wire.begin(line[2].manifest, line[2].patch)
    assert missing == list(line[2].blobs)
    await wire.put({digest: line[2].blobs[digest] for digest in missing[:sent]})
    process.end(signal.SIGKILL)
    await process.start()
    assert process.tiles() == {digest.hex() for digest in line[1].tiles}
    with pytest.raises(VersionUnavailable):
        await wire.ways(2, [1])
    await publish(wire, line[2])
    assert await Reader(wire).pull(2, line[1]) == tiles_by_place(line[2])


async def test_publishing_a_patch_again_is_harmless(wire: Any) -> None:
    line = Line(2, sizes=SMALL)
    await publish_all(wire, line)
    assert await wire.begin(line[2].manifest, line[2].patch) == []
    assert await wire.begin(line[2].manifest) == []
    await wire.commit(line[2].manifest)


async def test_a_patch_from_what_the_relay_does_not_hold_is_asked_for_whole(wire: Any) -> None:
    line, other = Line(3, sizes=SMALL), Line(2, sizes=SMALL, seed=1)
    with pytest.raises(NotReady, match="publish all of it"):
        await wire.begin(line[2].manifest, line[2].patch)
    await publish(wire, other[1])
    with pytest.raises(NotReady, match="publish all of it"):
        await wire.begin(line[2].manifest, line[2].patch)
    await wire.publish(line[2].manifest, line[2].tiles)
    await publish(wire, line[3])
    assert await Reader(wire).pull(3) == tiles_by_place(line[3])


async def test_a_patch_that_lies_is_refused_before_any_blob_is_wanted(wire: Any) -> None:
    line = Line(3, sizes=SMALL)
    await publish(wire, line[1])
    honest = line[2].patch
    assert honest is not None
    cut = honest.tensors[0].digests[1:]
    for change, error, text in (
        ({"changed": 7}, ChunkCorrupt, "root digest"),
        ({"tensors": honest.tensors[:1]}, InvalidRequest, "patch.tensors"),
        (
            {"tensors": (msgspec.structs.replace(honest.tensors[0], digests=cut), *honest.tensors[1:])},
            InvalidRequest,
            "other digests",
        ),
        ({"version": line[3].manifest.version}, InvalidRequest, "patch.version"),
        ({"run_id": "other"}, InvalidRequest, "patch.version"),
    ):
        lie = msgspec.structs.replace(honest, **change)
        sealed = lie if error is ChunkCorrupt else msgspec.structs.replace(lie, root=patch_root(lie))
        forged = SIGNER.sign_patch(sealed)
        with pytest.raises(error, match=text):
            await wire.begin(line[2].manifest, forged)
    with pytest.raises(PermissionDenied, match="not signed"):
        await wire.begin(line[2].manifest, msgspec.structs.replace(honest, signature=b""))
    with pytest.raises(PermissionDenied, match="publisher's key"):
        await wire.begin(line[2].manifest, Signer(b"2" * 32).sign_patch(honest))
    assert await wire.begin(line[2].manifest, honest)


def with_blob(version: Version, position: int, blob: bytes) -> Version:
    """The version, its patch leading through another tile patch there, sealed and signed as if all were well."""
    patch = version.patch
    assert patch is not None
    first = patch.tensors[0]
    sizes, digests = list(first.sizes), list(first.digests)
    sizes[position], digests[position] = len(blob), tile_digest(blob)
    tensor = msgspec.structs.replace(first, sizes=tuple(sizes), digests=tuple(digests))
    forged = SIGNER.sign_patch(seal_patch(msgspec.structs.replace(patch, tensors=(tensor, *patch.tensors[1:]))))
    return Version(version.manifest, forged, version.tensors, {**version.blobs, tile_digest(blob): blob}, version.tiles)


@pytest.mark.parametrize("damage", ["header", "units", "cut", "bomb"])
async def test_a_tile_patch_that_is_none_is_never_stored(damage: str, process: Any, wire: Any) -> None:
    line = Line(2, sizes=SMALL)
    await publish(wire, line[1])
    assert line[2].patch is not None
    blob = line[2].blobs[line[2].patch.tensors[0].digests[0]]
    bad = {
        "header": b"\xff" + blob[1:],
        "units": blob[:4] + (19_999).to_bytes(4, "little") + blob[8:],
        "cut": blob[:8] + (len(blob) - 13).to_bytes(4, "little") + blob[12:-1],
        "bomb": blob[:12] + (1 << 31).to_bytes(4, "little") + blob[16:],
    }[damage]
    forged = with_blob(line[2], 0, bad)
    before = process.tiles()
    await wire.begin(forged.manifest, forged.patch)
    with pytest.raises(InvalidRequest):
        await wire.put({tile_digest(bad): bad})
    assert process.tiles() == before
    with pytest.raises(NotReady, match="still lacks"):
        await wire.commit(forged.manifest)
    await publish(wire, line[2])


async def test_a_version_that_its_patch_does_not_make_is_withdrawn_with_what_it_leads_to(
    process: Any, wire: Any
) -> None:
    process.end(signal.SIGTERM)
    await process.start("--keyframe-every", "3")
    line = Line(5, sizes=SMALL)
    other = Line(2, sizes=SMALL, seed=4)
    await publish_all(wire, Line(2, sizes=SMALL))
    assert other[2].patch is not None
    wrong = other[2].blobs[other[2].patch.tensors[0].digests[0]]
    await publish(wire, with_blob(line[3], 0, wrong))
    await publish(wire, line[4])
    patched = process.data / "versions" / "run" / "policy"
    await wait_until(lambda: len(list(patched.glob("*.patched"))) == 1, what="the end of versions 3 and 4")
    with pytest.raises(VersionUnavailable):
        await wire.ways(4, [1])
    with pytest.raises(NotReady, match="publish all of it"):
        await wire.begin(line[5].manifest, line[5].patch)
    assert await Reader(wire).pull(2, line[1]) == tiles_by_place(line[2])
    await wire.publish(line[5].manifest, line[5].tiles)


async def test_a_patch_damaged_on_disk_is_let_go_with_what_it_alone_leads_to(process: Any, wire: Any) -> None:
    line = Line(4, sizes=SMALL)
    await publish_all(wire, line)
    digest = next(iter(line[3].blobs))
    path = process.data / "tiles" / digest.hex()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ChunkCorrupt, match="publish its versions again"):
        await wire.fetch([digest])
    with pytest.raises(VersionUnavailable):
        await wire.ways(3, [2])
    assert await Reader(wire).pull(2) == tiles_by_place(line[2])
    await publish(wire, line[3])
    await publish(wire, line[4])
    assert await Reader(wire).pull(4, line[2]) == tiles_by_place(line[4])
