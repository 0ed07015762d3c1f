"""Round trips, and the refusal of everything that is not what its root digest says."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from ebbtide.errors import ChunkCorrupt, EbbtideError, VersionUnavailable
from ebbtide.rpc.convert import from_proto, to_proto
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.v1 import weights_pb2
from ebbtide.weights import (
    Assembly,
    ManifestJoiner,
    ManifestPart,
    NamedTensor,
    as_array,
    build_manifest,
    check_manifest,
    root_digest,
    slice_tiles,
    split_manifest,
    tile_digest,
    tile_sizes,
)


def all_tiles(tensors: list[NamedTensor], tile_bytes: int = 16) -> dict[bytes, bytes]:
    return {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor, tile_bytes)}


def test_every_dtype_and_shape_comes_back_bit_for_bit(manifest: Manifest, tensors: list[NamedTensor]) -> None:
    tiles = all_tiles(tensors)
    assert set(tile_sizes(manifest)) == set(tiles)
    assembly = Assembly(manifest)
    while not assembly.complete:
        assembly.place(digest := assembly.missing[-1], tiles[digest])
    found = assembly.tensors()
    assert list(found) == [tensor.name for tensor in tensors]
    for tensor in tensors:
        assert (found[tensor.name].dtype, found[tensor.name].shape) == (tensor.dtype, tensor.shape)
        assert np.array_equal(as_array(found[tensor.name]), as_array(tensor))


def test_a_tile_that_several_tensors_share_is_listed_once_and_placed_everywhere() -> None:
    same = [NamedTensor(name=name, dtype="U8", shape=(32,), data=memoryview(bytes(32))) for name in "ab"]
    assembly = Assembly(build_manifest("run", PolicyVersion(policy="p", version=1), same, tile_bytes=16))
    assert len(assembly.missing) == 1
    assembly.place(assembly.missing[0], bytes(16))
    assert all(not as_array(tensor).any() for tensor in assembly.tensors().values())


def test_nothing_is_given_out_before_the_last_tile(manifest: Manifest, tensors: list[NamedTensor]) -> None:
    assembly = Assembly(manifest)
    tiles = all_tiles(tensors)
    for digest in assembly.missing[1:]:
        assembly.place(digest, tiles[digest])
    with pytest.raises(VersionUnavailable):
        assembly.tensors()


def test_a_manifest_travels_in_parts(manifest: Manifest) -> None:
    parts = list(split_manifest(manifest, part_bytes=200))
    assert len(parts) > 2
    joiner = ManifestJoiner()
    for part in parts:
        joiner.add(from_proto(to_proto(part, weights_pb2.ManifestPart), ManifestPart))
    assert joiner.join() == manifest


def test_the_root_covers_version_parent_step_run_and_tensor_order(manifest: Manifest) -> None:
    replace = msgspec.structs.replace
    version = manifest.version
    others = [
        replace(manifest, run_id="run-2"),
        replace(manifest, tensors=tuple(reversed(manifest.tensors))),
        *(
            replace(manifest, version=replace(version, **{name: value}))
            for name, value in {"policy": "q", "version": 4, "parent": 1, "step": 41}.items()
        ),
    ]
    assert len({root_digest(other) for other in [manifest, *others]}) == len(others) + 1
    for other in others:
        with pytest.raises(ChunkCorrupt):
            check_manifest(other)


def stored(manifest: Manifest) -> tuple[bytes, Callable[[bytes], Manifest]]:
    return msgspec.msgpack.encode(manifest), msgspec.msgpack.Decoder(Manifest).decode


def sent(manifest: Manifest) -> tuple[bytes, Callable[[bytes], Manifest]]:
    (part,) = split_manifest(manifest)

    def read(data: bytes) -> Manifest:
        joiner = ManifestJoiner()
        joiner.add(from_proto(weights_pb2.ManifestPart.FromString(data), ManifestPart))
        return joiner.join()

    return to_proto(part, weights_pb2.ManifestPart).SerializeToString(), read


@pytest.mark.parametrize("form", [stored, sent])
def test_every_flip_of_a_byte_of_a_manifest_is_refused(form: Any, manifest: Manifest) -> None:
    data, read = form(manifest)
    assert read(data) == manifest
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            mutant = bytearray(data)
            mutant[at] ^= mask
            try:
                found = read(bytes(mutant))
                check_manifest(found)
            except (EbbtideError, msgspec.MsgspecError, DecodeError, UnicodeDecodeError):
                continue
            assert found == manifest, f"byte {at} ^ {mask:#x} was accepted as something else"


@pytest.mark.parametrize("form", [stored, sent])
def test_every_truncation_of_a_manifest_is_refused(form: Any, manifest: Manifest) -> None:
    data, read = form(manifest)
    for length in range(len(data)):
        with pytest.raises((EbbtideError, msgspec.MsgspecError, DecodeError)):
            check_manifest(read(data[:length]))


def test_every_flip_and_truncation_of_a_tile_is_refused(manifest: Manifest, tensors: list[NamedTensor]) -> None:
    assembly = Assembly(manifest)
    for digest, data in all_tiles(tensors).items():
        mutants = [
            data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)
        ]
        for mutant in [*mutants, *(data[:at] for at in range(len(data))), data + b"\0"]:
            with pytest.raises(ChunkCorrupt):
                assembly.place(digest, mutant)
    assert assembly.missing == list(tile_sizes(manifest))
