"""Manifests, patches and blobs, broken at random, offered to what a worker or a relay reads them with: how many pass?

A mutant passes if it is taken for sound and is not what it was made from. Some are broken as a bad link breaks them;
others as somebody would who holds no key but all else: with digests, and roots, made to fit again.
"""

import random
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct

from benchmarks.forging import TILE, broken_bytes, broken_parts, forged_manifest, forged_patch
from ebbtide.errors import EbbtideError
from ebbtide.types.weights import Manifest, Patch, PolicyVersion, TensorPatch
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.weights import (
    ManifestJoiner,
    ManifestPart,
    NamedTensor,
    PatchJoiner,
    PatchPart,
    Signer,
    build_manifest,
    check_manifest,
    check_patch,
    check_signature,
    check_tile,
    seal_patch,
    slice_tiles,
    split_manifest,
    split_patch,
    tile_digest,
)
from ebbtide.weights.patch import Array, TileCodec
from ebbtide.wire import from_proto, to_proto

_SIGNER: Final = Signer(bytes(range(32)))
#: Name, shape, and where it lies in which shape, if it is a piece of a sharded tensor.
_SHAPES: Final[tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]] = (
    ("embed.weight", (37, 40), (), ()),
    ("layers.0.norm", (64,), (), ()),
    ("layers.0.o_proj.weight", (40, 20), (0, 0), (40, 32)),
    ("layers.0.o_proj.weight", (40, 12), (0, 20), (40, 32)),
    ("layers.0.up_proj.weight", (50, 33), (), ()),
)


class Verdict(Struct):
    """`accepted` and `crashed` name the kind of mutant; `allowed` counts lies that the form of a patch cannot tell, and
    that blobs do; `peak_bytes` is the most that one of them made us allocate."""

    tried: int = 0
    allowed: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    accepted: list[str] = msgspec.field(default_factory=list)
    crashed: list[str] = msgspec.field(default_factory=list)
    peak_bytes: int = 0
    resident_bytes: int = 0


class Sample(Struct, frozen=True):
    """A version, the one before, and what a link carries of both."""

    before: Manifest
    manifest: Manifest
    parts: tuple[bytes, ...]
    patch: Patch
    patch_parts: tuple[bytes, ...]
    tiles: tuple[tuple[str, bytes, bytes, bytes], ...]  # dtype, tile before, tile patch, tile after


def make_sample(seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    old = [rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _, shape, _, _ in _SHAPES]
    new = [bits + (rng.random(bits.shape) < 0.05).astype(np.uint16) for bits in old]
    versions = [PolicyVersion(policy="policy", version=n, parent=n - 1, step=n) for n in (1, 2)]
    both = [_tensors(bits) for bits in (old, new)]
    before, after = (
        _SIGNER.sign(build_manifest("run", version, tensors, TILE))
        for version, tensors in zip(versions, both, strict=True)
    )
    codec, parts, tiles = TileCodec(2, TILE), [], []
    for one, other in zip(*both, strict=True):
        sizes, digests = [], []
        for base, young in zip(slice_tiles(one, TILE), slice_tiles(other, TILE), strict=True):
            if base == young:
                sizes.append(0)
                continue
            blob = codec.encode(np.frombuffer(base, "<u2"), np.frombuffer(young, "<u2"))
            sizes.append(len(blob))
            digests.append(tile_digest(blob))
            tiles.append((one.dtype, bytes(base), blob, bytes(young)))
        parts.append(TensorPatch(sizes=tuple(sizes), digests=tuple(digests)))
    patch = Patch(
        run_id="run",
        base=before.version,
        version=after.version,
        tensors=tuple(parts),
        changed=sum(int(np.count_nonzero(one != other)) for one, other in zip(old, new, strict=True)),
        elements=sum(bits.size for bits in old),
    )
    patch = _SIGNER.sign_patch(seal_patch(patch))
    return Sample(
        before,
        after,
        tuple(_wire(part, pb.ManifestPart) for part in split_manifest(after, 600)),
        patch,
        tuple(_wire(part, pb.PatchPart) for part in split_patch(patch, 600)),
        tuple(tiles),
    )


def _tensors(bits: list[Array]) -> list[NamedTensor]:
    data = [array.reshape(-1).view("u1").data for array in bits]
    return [
        NamedTensor(name=name, dtype="BF16", shape=shape, data=flat, start=start, full=full)
        for (name, shape, start, full), flat in zip(_SHAPES, data, strict=True)
    ]


def _wire(record: Struct, message: Any) -> bytes:
    data: bytes = to_proto(record, message).SerializeToString()
    return data


# -- what reads them: nothing but what services read with ---------------------------------------------------------


def read_manifest(parts: Sequence[bytes], wanted: PolicyVersion) -> Manifest:
    joiner = ManifestJoiner()
    for part in parts:
        joiner.add(from_proto(pb.ManifestPart.FromString(part), ManifestPart))
    manifest = joiner.join()
    check_manifest(manifest)
    check_signature(manifest, _SIGNER.public)
    if manifest.version != wanted or manifest.run_id != "run":
        raise EbbtideError("another version's")
    return manifest


def read_patch(parts: Sequence[bytes], target: Manifest) -> Patch:
    joiner = PatchJoiner(target)
    for part in parts:
        joiner.add(from_proto(pb.PatchPart.FromString(part), PatchPart))
    patch = joiner.join()
    check_patch(patch, target)
    return patch


def make_tile(blob: bytes, base: bytes, digest: bytes) -> bytes:
    """As a mirror does: on a copy, and only what the manifest's digest confirms counts."""
    copy = np.frombuffer(base, "<u2").copy()
    TileCodec(2, TILE).apply(blob, copy)
    check_tile(digest, copy.view(np.uint8).data)
    return copy.tobytes()


# -- the trial ----------------------------------------------------------------------------------------------------


def _trials(sample: Sample, draw: random.Random) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Kind, an attempt to read a mutant, and what alone it may be read as: nothing, if that is None."""
    target, version = sample.manifest, sample.manifest.version
    while True:
        parts = broken_parts(sample.parts, draw)
        yield "manifest on a bad link", partial(read_manifest, parts, version), target
        forged = forged_manifest(target, draw)
        yield "manifest forged", partial(_read_forged, forged), target
        yield "manifest replayed", partial(read_manifest, _parts(sample.before), version), target
        parts = broken_parts(sample.patch_parts, draw)
        yield "patch on a bad link", partial(read_patch, parts, target), sample.patch
        lie, forbidden = forged_patch(sample.patch, draw)
        yield "patch forged", partial(_read_lie, lie, target), None if forbidden else lie
        dtype, base, blob, young = draw.choice(sample.tiles)
        mutant = broken_bytes(blob, draw)
        yield "blob on a bad link", partial(_checked, tile_digest(blob), mutant), blob
        yield f"{dtype} blob forged", partial(make_tile, mutant, base, tile_digest(young)), young


def _read_forged(manifest: Manifest) -> Manifest:
    return read_manifest(_parts(manifest), manifest.version)


def _read_lie(patch: Patch, target: Manifest) -> Patch:
    return read_patch([_wire(part, pb.PatchPart) for part in split_patch(patch)], target)


def _checked(digest: bytes, blob: bytes) -> bytes:
    check_tile(digest, blob)
    return blob


def _parts(manifest: Manifest) -> list[bytes]:
    return [_wire(part, pb.ManifestPart) for part in split_manifest(manifest)]


def offer(count: int, seed: int = 0) -> Verdict:
    """Offer `count` mutants. What a patch's form allows its reader cannot refuse; that is why blobs are checked too."""
    sample, draw, verdict = make_sample(seed), random.Random(seed), Verdict()
    make_tile(sample.tiles[0][2], sample.tiles[0][1], tile_digest(sample.tiles[0][3]))  # compiles, imports
    tracemalloc.start()
    try:
        for kind, attempt, sound in _trials(sample, draw):
            if verdict.tried == count:
                break
            verdict.tried += 1
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read = attempt()
            except (EbbtideError, DecodeError):  # gRPC answers the latter itself
                verdict.refused[kind] += 1
            except Exception as error:  # noqa: BLE001 - whatever else it is, it is a crash
                verdict.crashed.append(f"{kind}: {type(error).__name__} {error}")
            else:
                if read != sound:
                    verdict.accepted.append(kind)
                verdict.allowed += kind == "patch forged" and read == sound
            verdict.peak_bytes = max(verdict.peak_bytes, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    verdict.resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return verdict
