"""Round trips, and the refusal of everything that is not what its root digest says."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from google.protobuf.message import DecodeError

from ebbtide.errors import ChunkCorrupt, EbbtideError
from ebbtide.types.weights import Manifest
from ebbtide.v1 import weights_pb2
from ebbtide.weights import (
    ManifestJoiner,
    ManifestPart,
    NamedTensor,
    check_manifest,
    check_tile,
    root_digest,
    slice_tiles,
    split_manifest,
    tile_digest,
    tile_sizes,
)
from ebbtide.wire import from_proto, to_proto


def all_tiles(tensors: list[NamedTensor], tile_bytes: int = 16) -> dict[bytes, bytes]:
    return {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor, tile_bytes)}


def test_its_tiles_are_those_of_its_tensors(manifest: Manifest, tensors: list[NamedTensor]) -> None:
    assert set(tile_sizes(manifest)) == set(all_tiles(tensors))


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


def test_every_flip_and_truncation_of_a_tile_is_refused(tensors: list[NamedTensor]) -> None:
    for digest, data in all_tiles(tensors).items():
        mutants = [
            data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)
        ]
        for mutant in [*mutants, *(data[:at] for at in range(len(data))), data + b"\0"]:
            with pytest.raises(ChunkCorrupt):
                check_tile(digest, mutant, len(data))
