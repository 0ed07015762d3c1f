"""A crash before any one of the relay's file operations leaves all of a version, or nothing that can be seen.

So it is with patches, with keyframes made of them and let go, and with what arrives.
"""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ebbtide.weight_relay.library.relay_disk import RecoveredDisk, RelayDisk, recover
from ebbtide.weights import blob_sizes, check_tile, tile_sizes
from tests.integration.weight_relay.crashes import Crash, Crasher
from tests.integration.weight_relay.lines import Line, Version

STREAM = "run", "policy"
LINE = Line(4, sizes={"w": ("U8", "|u1", 1400)}, tile_bytes=500)


def put(disk: RelayDisk, version: Version) -> None:
    blobs = version.blobs if version.patch else version.tiles
    for digest, data in blobs.items():
        disk.put_tile(digest, data)
    disk.sync_tiles(blobs)
    if version.patch:
        disk.put_patch(version.patch)
    disk.put_manifest(version.manifest, keyframe=version.patch is None)


def dense(version: Version) -> Version:
    return Version(version.manifest, None, version.tensors, {}, version.tiles)


def prepare_keyframes(root: Path) -> None:
    with closing(RelayDisk(root)) as disk:
        put(disk, LINE[1])


def publish_dense_and_let_go(root: Path) -> None:
    """What the service does on disk: version 2 comes whole, version 1 goes."""
    with closing(RelayDisk(root)) as disk:
        put(disk, dense(LINE[2]))
        disk.drop_manifest(*STREAM, 1)
        disk.drop_tiles(LINE[1].tiles.keys() - LINE[2].tiles.keys())


def prepare_chain(root: Path) -> None:
    with closing(RelayDisk(root)) as disk:
        for version in (LINE[1], LINE[2], LINE[3]):
            put(disk, version)


def keyframe_and_let_go(root: Path) -> None:
    """A patch comes, version 4 becomes a keyframe out of it, the chain before goes, its last first as a passage."""
    with closing(RelayDisk(root)) as disk:
        put(disk, LINE[4])
        for digest, data in LINE[4].tiles.items():
            disk.put_tile(digest, data)
        disk.sync_tiles(LINE[4].tiles)
        disk.mark(STREAM, 4, keyframe=True)
        disk.mark(STREAM, 1, keyframe=False)
        disk.drop_tiles(LINE[1].tiles.keys() - LINE[4].tiles.keys())
        for number in (1, 2, 3):
            disk.drop_manifest(*STREAM, number)
        for number in (1, 2, 3):
            disk.drop_patch(STREAM, (number, number + 1))
            disk.drop_tiles(LINE[number + 1].blobs.keys() - LINE[4].tiles.keys())


def arrive(root: Path) -> None:
    """Version 4 comes from upstream, slowly."""
    with closing(RelayDisk(root)) as disk:
        disk.put_arrival(LINE[4].manifest, LINE[4].patch)
        put(disk, LINE[4])
        disk.drop_arrival(STREAM, 4)


def used(found: RecoveredDisk, on_disk: set[str]) -> set[str]:
    """The blobs that must be there, by what was found."""
    tiles = [tile_sizes(item.manifest) for item in found.versions.get(STREAM, {}).values() if item.keyframe]
    patches = [blob_sizes(patch) for patch, _ in found.patches.get(STREAM, {}).values()]
    names = {digest.hex() for blobs in tiles + patches for digest in blobs}
    coming = {digest.hex() for item in found.stages if item.patch for digest in blob_sizes(item.patch)}
    return names | (coming & on_disk)


def outcomes_of(tmp_path: Path, prepare: Callable[[Path], None], work: Callable[[Path], None]) -> list[tuple[int, ...]]:
    """The versions that are found after a crash at each operation, with all that they stand on."""
    outcomes: list[tuple[int, ...]] = []
    for at in range(400):
        root = tmp_path / str(at)
        prepare(root)
        with pytest.MonkeyPatch.context() as patch:
            crasher = Crasher(patch, at)
            try:
                work(root)
                crashed = False
            except Crash:
                crashed = True
        with closing(RelayDisk(root)) as disk:
            found = recover(disk)
        assert not found.refusals
        names = {path.name for path in (root / "tiles").iterdir()}
        assert names == used(found, names)
        for name in names:
            check_tile(bytes.fromhex(name), disk.get_tile(bytes.fromhex(name)))
        outcomes.append(tuple(found.versions[STREAM]))
        with closing(RelayDisk(root)) as disk:
            assert recover(disk) == found
        if not crashed:
            break
    assert len(outcomes) == len(crasher.log) + 1
    return list(dict.fromkeys(outcomes))


def test_a_crash_at_any_operation_leaves_whole_versions(tmp_path: Path) -> None:
    assert outcomes_of(tmp_path, prepare_keyframes, publish_dense_and_let_go) == [(1,), (1, 2), (2,)]


def test_a_crash_while_a_keyframe_is_made_leaves_every_version_a_path(tmp_path: Path) -> None:
    whole = (1, 2, 3, 4)
    assert sorted({tuple(sorted(found)) for found in outcomes_of(tmp_path, prepare_chain, keyframe_and_let_go)}) == [
        (1, 2, 3),
        whole,
        (2, 3, 4),
        (3, 4),
        (4,),
    ]


def test_a_crash_while_a_version_arrives_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, prepare_chain, arrive)
    assert {tuple(sorted(found)) for found in outcomes} == {(1, 2, 3), (1, 2, 3, 4)}


def test_a_manifest_is_renamed_only_after_its_tiles_are_durable(tmp_path: Path) -> None:
    prepare_keyframes(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        crasher = Crasher(patch, 1000)
        publish_dense_and_let_go(tmp_path)
    count = len(LINE[2].tiles)
    steps = ["write", "rename"] * count + ["fsync"] * (count + 1) + ["write", "fsync", "rename"]
    assert crasher.log[: len(steps)] == steps


def test_a_patch_is_durable_before_the_version_that_stands_on_it(tmp_path: Path) -> None:
    prepare_chain(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        crasher = Crasher(patch, 1000)
        with closing(RelayDisk(tmp_path)) as disk:
            put(disk, LINE[4])
    count = len(LINE[4].blobs)
    record = ["write", "fsync", "rename", "fsync", "fsync", "fsync"]
    assert crasher.log == ["write", "rename"] * count + ["fsync"] * (count + 1) + record * 2


@pytest.mark.parametrize("what", ["tiles", "versions"])
def test_a_file_cut_at_any_byte_takes_its_version_with_it(what: str, tmp_path: Path) -> None:
    prepare_keyframes(tmp_path / "whole")
    for length in range(1000):
        root = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(length)))
        path = next(path for path in sorted((root / what).rglob("*")) if path.is_file())
        data = path.read_bytes()
        if length >= len(data):
            break
        path.write_bytes(data[:length])
        with closing(RelayDisk(root)) as disk:
            found = recover(disk)
        assert not found.versions
        assert len(found.refusals) == 1
        assert not list((root / "tiles").iterdir())
    assert length > 8


@pytest.mark.parametrize("suffix", ["patch", "patched"])
def test_a_patch_or_a_manifest_cut_at_any_byte_takes_what_it_alone_leads_to(suffix: str, tmp_path: Path) -> None:
    prepare_chain(tmp_path / "whole")
    for length in range(0, 1000, 7):
        root = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(length)))
        path = min((root / "versions").rglob(f"*.{suffix}"))
        data = path.read_bytes()
        if length >= len(data):
            break
        path.write_bytes(data[:length])
        with closing(RelayDisk(root)) as disk:
            found = recover(disk)
        assert list(found.versions[STREAM]) == [1]
        assert len(found.refusals) == 1
        assert {path.name for path in (root / "tiles").iterdir()} == {digest.hex() for digest in LINE[1].tiles}
    assert length > 8


def test_what_arrived_damaged_is_wanted_again_after_a_restart(tmp_path: Path) -> None:
    prepare_chain(tmp_path)
    good, bad = list(LINE[4].blobs.items())[:2]
    with closing(RelayDisk(tmp_path)) as disk:
        disk.put_arrival(LINE[4].manifest, LINE[4].patch)
        disk.put_tile(*good)
        disk.put_tile(bad[0], bad[1][:-1] + bytes([bad[1][-1] ^ 1]))
        found = recover(disk)
    names = {path.name for path in (tmp_path / "tiles").iterdir()}
    assert [item.manifest.version.version for item in found.stages] == [4]
    assert good[0].hex() in names
    assert bad[0].hex() not in names
