"""Seals patches between versions with a root digest, and checks them before anything is fetched or allocated."""

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
    """Return the patch with its root digest."""
    return msgspec.structs.replace(patch, root=patch_root(patch))


def patch_root(patch: Patch) -> bytes:
    """Compute the digest, 32 bytes, of run, both versions with their roots, and all tiles of a patch."""
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
    """Tell whether the tensors of two versions agree in all but digests, as a patch between them requires."""
    if one.tile_bytes != other.tile_bytes or len(one.tensors) != len(other.tensors):
        return False
    return all(
        (a.name, a.dtype, a.shape, a.start, a.full) == (b.name, b.dtype, b.shape, b.start, b.full)
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


def check_patch(patch: Patch, target: Manifest) -> None:
    """Refuse a patch that is malformed, does not lead to `target` (a checked manifest) or does not match its root.

    Raises `InvalidRequest` naming the field, `ChunkCorrupt` if only the root digest is wrong, and `PermissionDenied`
    if another key than the target's publisher's signed it. Patches that a relay composed are not signed.
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
    """Raise `InvalidRequest` naming the tensor unless this is a patch of the entry's tiles."""
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
            raise InvalidRequest("has a dense tile that is not in the version", field=entry.name)


def patched_tiles(tensor: TensorPatch) -> Iterator[tuple[int, int, bytes]]:
    """Yield index, size and digest of each tile that differs from the base's."""
    digests = iter(tensor.digests)
    for index, size in enumerate(tensor.sizes):
        if size:
            yield index, size, next(digests)


def blob_sizes(patch: Patch) -> dict[bytes, int]:
    """Return every distinct tile patch and dense tile of a checked patch with its bytes, in the order of first use."""
    return {digest: size for tensor in patch.tensors for _, size, digest in patched_tiles(tensor)}
