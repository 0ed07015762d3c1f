"""Patches between versions: their root digest, and what is refused before anything is fetched or allocated for one."""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
from blake3 import blake3

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.weights import DIGEST_BYTES, Manifest, Patch, TensorEntry, TensorPatch
from ebbtide.weights.manifest.manifest import check_head
from ebbtide.weights.signing import check_patch_signature
from ebbtide.weights.tiles import tile_size

_CONTEXT: Final = "ebbtide 2026-11 patch"


def seal_patch(patch: Patch) -> Patch:
    """The patch with its root digest."""
    return msgspec.structs.replace(patch, root=patch_root(patch))


def patch_root(patch: Patch) -> bytes:
    """The digest, 32 bytes, that binds run, both versions by their roots, and all tiles of a patch."""
    root = blake3(derive_key_context=_CONTEXT)
    for text in (patch.run_id, patch.version.policy):
        encoded = text.encode()
        root.update(struct.pack("<Q", len(encoded)) + encoded)
    for version in (patch.base, patch.version):
        root.update(struct.pack("<QQQ", version.version, version.parent, version.step) + version.root)
    root.update(struct.pack("<QQQ", patch.changed, patch.elements, len(patch.tensors)))
    for tensor in patch.tensors:
        root.update(struct.pack(f"<QQ{len(tensor.sizes)}Q", len(tensor.digests), len(tensor.sizes), *tensor.sizes))
        root.update(b"".join(tensor.digests))
    return root.digest()


def same_geometry(one: Manifest, other: Manifest) -> bool:
    """Whether the tensors of two versions agree in all but digests, so that a patch can lead from one to the other."""
    if one.tile_bytes != other.tile_bytes or len(one.tensors) != len(other.tensors):
        return False
    return all(
        (a.name, a.dtype, a.shape, a.start, a.full) == (b.name, b.dtype, b.shape, b.start, b.full)
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


def check_patch(patch: Patch, target: Manifest) -> None:
    """Refuse a patch that is malformed, not one to `target` (a checked manifest), or not what its root says.

    Raises `InvalidRequest` naming the field, `ChunkCorrupt` when only the root digest is wrong, and `PermissionDenied`
    when it is signed, but not by the target's publisher. One that is not signed was composed by a relay.
    """
    check_head(patch.run_id, patch.base, target.tile_bytes)
    if (patch.run_id, patch.version) != (target.run_id, target.version):
        raise InvalidRequest("is not a patch to the version of the manifest", field="patch.version")
    if patch.base.policy != patch.version.policy or patch.base.version == patch.version.version:
        raise InvalidRequest("must be another version of the same policy", field="patch.base")
    if len(patch.tensors) != len(target.tensors):
        raise InvalidRequest(f"has {len(patch.tensors)} tensors, not {len(target.tensors)}", field="patch.tensors")
    if not 0 <= patch.changed <= patch.elements < 1 << 63:
        raise InvalidRequest("must be from 0 to all elements", field="patch.changed")
    sizes: dict[bytes, int] = {}
    for entry, tensor in zip(target.tensors, patch.tensors, strict=True):
        check_tensor_patch(entry, tensor, target.tile_bytes)
        for _, size, digest in patched_tiles(tensor):
            if sizes.setdefault(digest, size) != size:
                raise InvalidRequest("gives one tile patch two sizes", field=entry.name)
    if patch_root(patch) != patch.root:
        raise ChunkCorrupt("the patch does not match its root digest: fetch or send it again")
    if patch.signature:
        check_patch_signature(patch, target.publisher)


def check_tensor_patch(entry: TensorEntry, tensor: TensorPatch, tile_bytes: int) -> None:
    """Refuse what is no patch of the entry's tiles. Raises `InvalidRequest` naming the tensor."""
    if len(tensor.sizes) != len(entry.digests):
        raise InvalidRequest(f"has a patch of {len(tensor.sizes)} tiles", field=entry.name)
    if len(tensor.digests) != sum(1 for size in tensor.sizes if size):
        raise InvalidRequest("has a patch with other digests than tiles", field=entry.name)
    if any(len(digest) != DIGEST_BYTES for digest in tensor.digests):
        raise InvalidRequest(f"has a digest that is not {DIGEST_BYTES} bytes", field=entry.name)
    for index, size, digest in patched_tiles(tensor):
        most = tile_size(entry, index, tile_bytes)
        if not 0 <= size <= most:
            raise InvalidRequest(f"has a patch of {size} bytes for a tile of {most}", field=entry.name)
        if size == most and digest != entry.digests[index]:
            raise InvalidRequest("has a dense tile that is not the version's", field=entry.name)


def patched_tiles(tensor: TensorPatch) -> Iterator[tuple[int, int, bytes]]:
    """Index, size and digest of each tile that is not the base's."""
    digests = iter(tensor.digests)
    for index, size in enumerate(tensor.sizes):
        if size:
            yield index, size, next(digests)


def blob_sizes(patch: Patch) -> dict[bytes, int]:
    """Every distinct tile patch and dense tile of a checked patch and its bytes, in the order of first use."""
    sizes: dict[bytes, int] = {}
    for tensor in patch.tensors:
        for _, size, digest in patched_tiles(tensor):
            sizes.setdefault(digest, size)
    return sizes
