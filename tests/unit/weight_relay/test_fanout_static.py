"""A static copy grows by whole versions, and is none before its index says so."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.transfer.static_source import StaticIndex
from ebbtide.types.weights import PolicyVersion
from ebbtide.weight_relay.static_copy import StaticCopyWriter, StaticVersion
from ebbtide.weights import build_manifest, named_tensor, slice_tiles, tile_digest

TILE = 1 << 12


class Made:
    """A version of tensors drawn by `seeds`, of three tiles each, and its blobs."""

    def __init__(self, number: int, seeds: Sequence[int]) -> None:
        draws = {f"w{seed}": np.random.default_rng(seed).integers(0, 256, 3 * TILE - 8, dtype="u1") for seed in seeds}
        tensors = [named_tensor(*item) for item in draws.items()]
        manifest = build_manifest("run", PolicyVersion(policy="policy", version=number), tensors, TILE)
        self.version = StaticVersion(manifest=manifest)
        self.blobs = {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor, TILE)}


def write(made: Made, folder: Path, *, most: int = 1000) -> StaticCopyWriter:
    writer = StaticCopyWriter(made.version, folder, file_bytes=2 * TILE)
    for digest in writer.missing[:most]:
        writer.add(digest, made.blobs[digest])
    writer.close()
    return writer


def read(folder: Path, digest: bytes) -> bytes:
    [spot] = StaticIndex((folder / "index").read_bytes()).spots([digest])
    return (folder / f"{spot.file:05d}.blobs").read_bytes()[spot.offset : spot.offset + spot.size]


def test_every_blob_is_found_where_the_index_says(tmp_path: Path) -> None:
    made = Made(1, [1, 2])
    write(made, tmp_path).finish()
    assert all(read(tmp_path, digest) == data for digest, data in made.blobs.items())
    assert max(path.stat().st_size for path in tmp_path.glob("*.blobs")) <= 2 * TILE
    stored = msgspec.msgpack.decode((tmp_path / "version-1.msgpack").read_bytes(), type=StaticVersion)
    assert stored == made.version


def test_a_further_version_adds_what_is_new_and_leaves_what_is_there(tmp_path: Path) -> None:
    first, second = Made(1, [1, 2]), Made(2, [2, 3])
    write(first, tmp_path).finish()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.blobs")}
    writer = write(second, tmp_path)
    assert writer.written == 3 * TILE - 8
    writer.finish()
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert all(read(tmp_path, digest) == data for digest, data in (first.blobs | second.blobs).items())
    assert write(second, tmp_path).written == 0


def test_a_writer_that_died_leaves_what_was_there_and_the_next_one_succeeds(tmp_path: Path) -> None:
    first, second = Made(1, [1]), Made(2, [2])
    write(first, tmp_path).finish()
    index = (tmp_path / "index").read_bytes()
    dead = write(second, tmp_path, most=2)
    with pytest.raises(InvalidRequest, match="1 blobs are missing"):
        dead.finish()
    assert (tmp_path / "index").read_bytes() == index
    write(second, tmp_path).finish()
    assert all(read(tmp_path, digest) == data for digest, data in (first.blobs | second.blobs).items())


def test_a_wrong_blob_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    made = Made(1, [1])
    writer = StaticCopyWriter(made.version, tmp_path)
    with pytest.raises(ChunkCorrupt):
        writer.add(writer.missing[0], b"x" * TILE)
    (tmp_path / "index").write_bytes(b"something else")
    with pytest.raises(InvalidRequest, match="folder"):
        StaticCopyWriter(made.version, tmp_path)
