"""One file of whole tensors, whatever pieces a version came in."""

import json

import numpy as np
import pytest

from ebbtide.weights import FileLayout, NamedTensor, build_manifest, places, slice_tiles
from tests.unit.weights.chain import TILE, Link, chain, whole


@pytest.fixture
def link() -> Link:
    return chain(1)[0]


def laid_out(link: Link, layout: FileLayout) -> np.ndarray:
    file = np.zeros(layout.size, np.uint8)
    file[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    for tensor, tile in places(link.manifest):
        data = list(slice_tiles(link.tensors[tensor], TILE))[tile]
        layout.write(file, tensor, tile, np.frombuffer(data, np.uint8))
    return file


def test_tiles_of_pieces_make_whole_tensors_that_safetensors_reads(link: Link) -> None:
    safetensors = pytest.importorskip("safetensors")
    found = dict(safetensors.deserialize(laid_out(link, FileLayout(link.manifest)).tobytes()))
    assert {name: bytes(entry["data"]) for name, entry in found.items()} == whole(link)


def test_a_tile_is_read_as_it_was_written(link: Link) -> None:
    layout = FileLayout(link.manifest)
    file = laid_out(link, layout)
    for tensor, tile in places(link.manifest):
        assert bytes(layout.read(file, tensor, tile)) == bytes(list(slice_tiles(link.tensors[tensor], TILE))[tile])


def test_other_pieces_and_another_order_make_the_same_file(link: Link) -> None:
    tensors = [
        NamedTensor(
            name=name,
            dtype=entry.dtype,
            shape=entry.full_shape,
            data=memoryview(data),
        )
        for name, data in whole(link).items()
        for entry in [next(item for item in link.manifest.tensors if item.name == name)]
    ]
    other = build_manifest("run", link.manifest.version, reversed(tensors), TILE)
    assert FileLayout(other).header == FileLayout(link.manifest).header


def test_data_is_aligned_for_every_dtype(link: Link) -> None:
    header = FileLayout(link.manifest).header
    assert len(header) % 64 == 0
    assert json.loads(header[8:])["full"]["shape"] == [6, 4, 3]
