"""A line of versions made by random changes, with the patches between neighbours: whole tensors and pieces."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from ebbtide.types.weights import Manifest, Patch, PolicyVersion, TensorPatch
from ebbtide.weights import NamedTensor, build_manifest, seal_patch, slice_tiles, tile_digest
from ebbtide.weights.patch import TileCodec
from ebbtide.weights.tensors import unit_width

TILE = 64
#: name, dtype, shape, and the pieces that it is published in: none, or (start, shape) of each.
TENSORS = (
    ("brain", "BF16", (13, 11), ()),
    ("half", "F16", (70,), ()),
    ("nothing", "F32", (0, 3), ()),
    ("full", "F32", (6, 4, 3), (((0, 0, 0), (6, 1, 3)), ((0, 1, 0), (6, 3, 3)))),
    ("eight", "F8_E4M3", (9, 20), (((0, 0), (9, 8)), ((0, 8), (9, 12)))),
    ("rows", "BF16", (10, 16), (((0, 0), (4, 16)), ((4, 0), (6, 16)))),
    ("scalar", "F32", (), ()),
    ("double", "F64", (5, 3), ()),
)


class Link(Struct, frozen=True):
    """A version, its blobs by digest, and the patch from the version before (None: the first)."""

    manifest: Manifest
    tensors: tuple[NamedTensor, ...]
    blobs: dict[bytes, bytes]
    patch: Patch | None


def chain(length: int, *, seed: int = 0, density: float = 0.05) -> list[Link]:
    """Versions 1 to `length`. Every fourth tile or so stays, and some change altogether."""
    rng = np.random.default_rng(seed)
    bits = {name: rng.integers(0, 256, _bytes(dtype, shape), dtype=np.uint8) for name, dtype, shape, _ in TENSORS}
    links: list[Link] = []
    for number in range(1, length + 1):
        if links:
            for name, dtype, _, _ in TENSORS:
                bits[name] = _stepped(bits[name], dtype, rng, density)
        links.append(link(number, tuple(_pieces(bits)), links[-1] if links else None))
    return links


def _stepped(bits: np.ndarray, dtype: str, rng: np.random.Generator, density: float) -> np.ndarray:
    units = bits.copy().view(f"<u{unit_width(dtype)}")
    for start in range(0, len(units), 32):
        part = units[start : start + 32]
        match rng.integers(4):
            case 0:
                pass
            case 1:
                part[:] = rng.integers(0, np.iinfo(units.dtype).max, len(part), dtype=units.dtype)
            case _:
                part += (rng.random(len(part)) < density).astype(units.dtype)
    return units.view(np.uint8)


def link(number: int, tensors: tuple[NamedTensor, ...], before: Link | None, tile_bytes: int = TILE) -> Link:
    """A version of `tensors`, by a patch from the one before."""
    version = PolicyVersion(policy="policy", version=number, parent=number - 1, step=number)
    manifest = build_manifest("run", version, tensors, tile_bytes)
    blobs = {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor, tile_bytes)}
    if before is None:
        return Link(manifest, tensors, blobs, None)
    parts = [_patch(old, new, blobs, tile_bytes) for old, new in zip(before.tensors, tensors, strict=True)]
    patch = Patch(run_id="run", base=before.manifest.version, version=manifest.version, tensors=tuple(parts))
    return Link(manifest, tensors, blobs, seal_patch(patch))


def _patch(old: NamedTensor, new: NamedTensor, blobs: dict[bytes, bytes], tile_bytes: int) -> TensorPatch:
    width = unit_width(new.dtype)
    codec, sizes, digests = TileCodec(width, tile_bytes, compiled=False), [], []
    for before, after in zip(slice_tiles(old, tile_bytes), slice_tiles(new, tile_bytes), strict=True):
        blob = codec.encode(np.frombuffer(before, f"<u{width}"), np.frombuffer(after, f"<u{width}"))
        if before == after:
            sizes.append(0)
            continue
        blob = min(bytes(after), blob, key=len)  # of the same size, it is the dense tile
        sizes.append(len(blob))
        digests.append(tile_digest(blob))
        blobs[digests[-1]] = blob
    return TensorPatch(sizes=tuple(sizes), digests=tuple(digests))


def _pieces(bits: dict[str, np.ndarray]) -> Iterator[NamedTensor]:
    for name, dtype, shape, pieces in TENSORS:
        if not pieces:
            yield NamedTensor(name=name, dtype=dtype, shape=shape, data=bits[name].data)
            continue
        whole = bits[name].reshape(*shape, -1)
        for start, size in pieces:
            box = tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))
            data = np.ascontiguousarray(whole[box]).reshape(-1)
            yield NamedTensor(name=name, dtype=dtype, shape=size, data=data.data, start=start, full=shape)


def whole(link: Link) -> dict[str, bytes]:
    """The bytes of each whole tensor of a version."""
    found: dict[str, np.ndarray] = {}
    for tensor in link.tensors:
        data = np.frombuffer(tensor.data, np.uint8)
        if not tensor.full:
            found[tensor.name] = data
            continue
        size = _bytes(tensor.dtype, (1,))
        into = found.setdefault(tensor.name, np.zeros((*tensor.full, size), np.uint8))
        box = tuple(slice(a, a + n) for a, n in zip(tensor.start, tensor.shape, strict=True))
        into[box] = data.reshape(*tensor.shape, size)
    return {name: array.tobytes() for name, array in found.items()}


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    from ebbtide.weights.tensors import carrier

    return carrier(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
