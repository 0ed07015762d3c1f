"""A crash before any one of the relay's file operations leaves all of a version, or nothing that can be seen."""

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weight_relay.disk import Disk
from ebbtide.weights import build_manifest, check_tile, named_tensor, slice_tiles, tile_digest, tile_sizes


class Crash(BaseException):
    """The process ends here."""


class Crasher:
    """Ends the process before file operation number `at`; a write cut short leaves half of its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self._left = at
        self.log: list[str] = []
        write = Path.write_bytes
        for owner, name in ((Path, "rename"), (Path, "unlink"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

        def write_bytes(path: Path, data: bytes) -> int:
            if self._left == 0:
                write(path, data[: len(data) // 2])
            self._count("write")
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._count(name)
            return real(*args, **options)

        return call

    def _count(self, name: str) -> None:
        if self._left == 0:
            raise Crash
        self._left -= 1
        self.log.append(name)


def small_version(number: int) -> tuple[Manifest, dict[bytes, bytes]]:
    tensor = named_tensor("w", np.random.default_rng(number).integers(0, 256, 40, dtype="u1"))
    manifest = build_manifest("run", PolicyVersion(policy="policy", version=number), [tensor], tile_bytes=16)
    return manifest, {tile_digest(tile): bytes(tile) for tile in slice_tiles(tensor, 16)}


def put(disk: Disk, manifest: Manifest, tiles: dict[bytes, bytes]) -> None:
    for digest, data in tiles.items():
        disk.put_tile(digest, data)
    disk.sync_tiles(tiles)
    disk.put_manifest(manifest)


def publish_and_let_go(root: Path) -> None:
    """What the service does on disk: version 2 comes, version 1 goes."""
    with closing(Disk(root)) as disk:
        put(disk, *small_version(2))
        disk.drop_manifest("run", "policy", 1)
        disk.drop_tiles(small_version(1)[1])


def prepare(root: Path) -> None:
    with closing(Disk(root)) as disk:
        put(disk, *small_version(1))


def test_a_crash_at_any_operation_leaves_whole_versions(tmp_path: Path) -> None:
    outcomes: list[tuple[int, ...]] = []
    for at in range(100):
        root = tmp_path / str(at)
        prepare(root)
        with pytest.MonkeyPatch.context() as patch:
            crasher = Crasher(patch, at)
            try:
                publish_and_let_go(root)
                crashed = False
            except Crash:
                crashed = True
        with closing(Disk(root)) as disk:
            whole, refused = disk.load()
        assert not refused
        outcomes.append(tuple(manifest.version.version for manifest in whole))
        expected = {digest.hex() for manifest in whole for digest in tile_sizes(manifest)}
        assert {path.name for path in (root / "tiles").iterdir()} == expected
        for name in expected:
            check_tile(bytes.fromhex(name), disk.get_tile(bytes.fromhex(name)))
        if not crashed:
            break
    assert list(dict.fromkeys(outcomes)) == [(1,), (1, 2), (2,)]
    assert len(outcomes) == len(crasher.log) + 1


def test_a_manifest_is_renamed_only_after_its_tiles_are_durable(tmp_path: Path) -> None:
    prepare(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        crasher = Crasher(patch, 1000)
        publish_and_let_go(tmp_path)
    steps = ["write", "rename"] * 3 + ["fsync"] * 4 + ["write", "fsync", "rename"]
    assert crasher.log[: len(steps)] == steps


@pytest.mark.parametrize("what", ["tiles", "versions"])
def test_a_file_cut_at_any_byte_takes_its_version_with_it(what: str, tmp_path: Path) -> None:
    prepare(tmp_path / "whole")
    for length in range(1000):
        root = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(length)))
        path = next(path for path in sorted((root / what).rglob("*")) if path.is_file())
        data = path.read_bytes()
        if length >= len(data):
            break
        path.write_bytes(data[:length])
        with closing(Disk(root)) as disk:
            whole, refused = disk.load()
        assert not whole
        assert len(refused) == 1
        assert not list((root / "tiles").iterdir())
    assert length > 8
