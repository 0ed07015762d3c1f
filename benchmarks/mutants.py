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

from ebbtide.errors import EbbtideError
from ebbtide.rpc.convert import from_proto, to_proto
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
    root_digest,
    seal_patch,
    slice_tiles,
    split_manifest,
    split_patch,
    tile_digest,
)
from ebbtide.weights.patch.tile import TileCodec

replace = msgspec.structs.replace
TILE: Final = 512
_SIGNER: Final = Signer(bytes(range(32)))
_OTHER: Final = Signer(bytes(32))


class Verdict(Struct):
    """`accepted` and `crashed` name the kind of mutant; `peak_bytes` is the most that one of them made us allocate."""

    tried: int = 0
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
    shapes = {"embed.weight": (37, 40), "layers.0.norm": (64,), "layers.0.up_proj.weight": (50, 33)}
    old = {name: rng.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in shapes.items()}
    new = {name: bits + (rng.random(bits.shape) < 0.05).astype(np.uint16) for name, bits in old.items()}
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
    patch = Patch(run_id="run", base=before.version, version=after.version, tensors=tuple(parts))
    patch = _SIGNER.sign_patch(seal_patch(patch))
    return Sample(
        before,
        after,
        tuple(_wire(part, pb.ManifestPart) for part in split_manifest(after, 600)),
        patch,
        tuple(_wire(part, pb.PatchPart) for part in split_patch(patch, 600)),
        tuple(tiles),
    )


def _tensors(bits: dict[str, Any]) -> list[NamedTensor]:
    return [
        NamedTensor(name=name, dtype="BF16", shape=array.shape, data=memoryview(array.reshape(-1).view(np.uint8)))
        for name, array in bits.items()
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


# -- how they are broken ------------------------------------------------------------------------------------------


def broken_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flipped, cut, doubled, zeroed, stuffed or swapped somewhere."""
    out = bytearray(data)
    at = draw.randrange(len(out)) if out else 0
    span = draw.randint(1, 16)
    match draw.randrange(7):
        case 0:
            out[at] ^= 1 << draw.randrange(8)
        case 1:
            del out[at:]
        case 2:
            del out[at : at + span]
        case 3:
            out[at:at] = out[at : at + span]
        case 4:
            out[at : at + span] = bytes(len(out[at : at + span]))
        case 5:
            out[at:at] = draw.randbytes(span)
        case _:
            out[at : at + 4] = draw.choice((0xFFFFFFFF, 0x7FFFFFFF, 1 << 20, 0)).to_bytes(4, "little")
    return bytes(out)


def broken_parts(parts: Sequence[bytes], draw: random.Random) -> list[bytes]:
    """A part broken, left out, sent twice, or out of order."""
    out = list(parts)
    at, to = draw.randrange(len(out)), draw.randrange(len(out))
    match draw.randrange(5):
        case 0:
            del out[at]
        case 1:
            out.insert(to, out[at])
        case 2:
            out[at], out[to] = out[to], out[at]
        case _:
            out[at] = broken_bytes(out[at], draw)
    return out


_NAMES: Final = ("../x", "/etc/passwd", "", "a\0b", "x" * 600, "embed.weight", ".hidden")
_NUMBERS: Final = (0, 1, 3, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1)


def forged_manifest(manifest: Manifest, draw: random.Random) -> Manifest:
    """A field changed to something else, and the root made to fit: only the signature stands in the way."""
    tensors, version = list(manifest.tensors), manifest.version
    at = draw.randrange(len(tensors))
    entry = tensors[at]
    number = draw.choice(_NUMBERS)
    changes: list[Callable[[], Any]] = [
        lambda: replace(entry, name=draw.choice(_NAMES)),
        lambda: replace(entry, dtype=draw.choice(("F32", "F16", "F8_E4M3", "F128", ""))),
        lambda: replace(entry, shape=(number, *entry.shape[1:])),
        lambda: replace(entry, shape=entry.shape[::-1] + (1,) * draw.randrange(3)),
        lambda: replace(entry, size=number),
        lambda: replace(entry, digests=tuple(draw.sample(entry.digests, len(entry.digests)))),
        lambda: replace(entry, digests=(draw.randbytes(32), *entry.digests[1:])),
        lambda: replace(entry, start=(number,) * len(entry.shape), full=entry.shape),
    ]
    tensors[at] = draw.choice(changes)()
    match draw.randrange(4):
        case 0:
            tensors = draw.sample(tensors, len(tensors))
        case 1:
            field = draw.choice(("version", "parent", "step"))
            version = replace(version, **{field: min(number, (1 << 32) - 1)})
    changed = replace(manifest, tensors=tuple(tensors), version=version)
    try:
        version = replace(version, root=root_digest(changed))
    except Exception:  # noqa: BLE001 - a number that no root can hold
        return changed
    changed = replace(changed, version=version)
    return _OTHER.sign(changed) if draw.random() < 0.3 else changed


def forged_patch(patch: Patch, draw: random.Random) -> Patch:
    """A size, digest or version changed, and the root made to fit, as any relay can."""
    tensors = list(patch.tensors)
    at = draw.randrange(len(tensors))
    item = tensors[at]
    sizes, digests = list(item.sizes), list(item.digests)
    match draw.randrange(5):
        case 0:
            sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, TILE, TILE + 1, 1 << 20, (1 << 32) - 1))
        case 1:
            draw.shuffle(sizes)
            digests = digests[: draw.randrange(len(digests) + 1)]
        case 2:
            digests[draw.randrange(len(digests))] = draw.randbytes(draw.choice((0, 31, 33)))
        case 3:
            sizes.append(1)
        case _:
            return seal_patch(replace(patch, base=replace(patch.base, policy="other")))
    tensors[at] = TensorPatch(sizes=tuple(sizes), digests=tuple(digests))
    return seal_patch(replace(patch, tensors=tuple(tensors)))


# -- the trial ----------------------------------------------------------------------------------------------------


def _trials(sample: Sample, draw: random.Random) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Kind, an attempt to read a mutant, and what the sound thing reads as."""
    target, version = sample.manifest, sample.manifest.version
    while True:
        parts = broken_parts(sample.parts, draw)
        yield "manifest on a bad link", partial(read_manifest, parts, version), target
        forged = forged_manifest(target, draw)
        yield "manifest forged", partial(_read_forged, forged), target
        yield "manifest replayed", partial(read_manifest, _parts(sample.before), version), target
        parts = broken_parts(sample.patch_parts, draw)
        yield "patch on a bad link", partial(read_patch, parts, target), sample.patch
        lie = forged_patch(sample.patch, draw)
        yield "patch forged", partial(_read_lie, lie, target), lie
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
    """Offer `count` mutants. A patch forged within what its form allows is sound; that is why blobs are checked too."""
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
            verdict.peak_bytes = max(verdict.peak_bytes, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    verdict.resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return verdict
