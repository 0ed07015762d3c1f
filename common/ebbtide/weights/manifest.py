"""Builds, seals, signs and checks manifests (a version's tensors, their tiles' digests) and the patches between them.

Each has a root digest: BLAKE3 (256 bits, in key derivation mode) over a canonical encoding. A context for each kind
tells a manifest from a patch. A manifest's root covers run, version, parent, step and all tensors in order. Every field
is fixed-width little-endian or preceded by its length, so no two manifests share an encoding. The root does not cover
the model's configuration, which has its own signature, so readers that do not know that field compute the same root.
A publisher signs roots, which bind everything else, with its key: Ed25519 (RFC 8032).
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, Struct

from ebbtide.errors import ChunkCorrupt, InvalidRequest, PermissionDenied
from ebbtide.types.ids import check_id
from ebbtide.types.weights import (
    DIGEST_BYTES,
    KEY_BYTES,
    SIGNATURE_BYTES,
    TILE_BYTES,
    Manifest,
    Patch,
    PolicyVersion,
    TensorEntry,
    TensorPatch,
)
from ebbtide.weights.geometry import check_pieces
from ebbtide.weights.model_config import check_config
from ebbtide.weights.tensors import NamedTensor, carrier
from ebbtide.weights.tiles import describe, tile_count, tile_size

_CONFIG_CONTEXT: Final = "ebbtide 2026-11 model configuration"


class Signer:
    """A publisher's private key."""

    def __init__(self, seed: bytes) -> None:
        """Take the key's 32 secret bytes. Raises `InvalidRequest` for another length."""
        if len(seed) != KEY_BYTES:
            raise InvalidRequest(f"must have {KEY_BYTES} bytes", field="publisher_seed")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with signatures of its root and of its configuration, if it has one."""
        signature = self._key.sign(manifest.version.root)
        of_config = self._key.sign(_bound(manifest)) if manifest.config else b""
        return msgspec.structs.replace(manifest, publisher=self.public, signature=signature, config_signature=of_config)

    def sign_patch(self, patch: Patch) -> Patch:
        """Return the patch with a signature of its root."""
        return msgspec.structs.replace(patch, signature=self._key.sign(patch.root))


def check_signature(manifest: Manifest, publisher: bytes = b"") -> None:
    """Raise `PermissionDenied` unless the manifest's own key signed it, and that key is `publisher` where given.

    `check_manifest` checks the root itself.
    """
    if publisher and manifest.publisher != publisher:
        raise PermissionDenied("the manifest is signed by another key than the run's publisher's")
    _check_signed(manifest.publisher, manifest.signature, manifest.version.root, "manifest")
    if manifest.config:
        _check_signed(manifest.publisher, manifest.config_signature, _bound(manifest), "model's configuration")


def _bound(manifest: Manifest) -> bytes:
    """Return a digest of a version's root and its configuration together."""
    bound = blake3(derive_key_context=_CONFIG_CONTEXT)
    bound.update(manifest.version.root)  # has a fixed length
    bound.update(manifest.config)
    return bound.digest()


def check_patch_signature(patch: Patch, publisher: bytes) -> None:
    """Raise `PermissionDenied` unless `publisher` signed the patch. `check_patch` checks the root itself."""
    _check_signed(publisher, patch.signature, patch.root, "patch")


def _check_signed(key: bytes, signature: bytes, root: bytes, what: str) -> None:
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise PermissionDenied(f"the {what} is not signed")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, root)
    except (InvalidSignature, ValueError):
        raise PermissionDenied(f"the signature of the {what} is not that of its publisher's key") from None


_MANIFEST_CONTEXT: Final = "ebbtide 2026-11 manifest"
#: Dots only inside: parameters are named so, but a name must not leave its folder or be a hidden file.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,511}")
_METADATA: Final = "__metadata__"  # safetensors reserves this key of its header


class ManifestLimits(Struct, frozen=True, kw_only=True):
    """The limits of a manifest, checked before anything is allocated for it."""

    bytes: Annotated[int, Meta(ge=1)] = 4 << 40
    tensors: Annotated[int, Meta(ge=1)] = 1 << 20
    tiles: Annotated[int, Meta(ge=1)] = 4 << 20  # their digests take 128 MiB
    rank: Annotated[int, Meta(ge=0)] = 16
    pieces: Annotated[int, Meta(ge=1)] = 4096  # of one tensor
    cuts: Annotated[int, Meta(ge=1)] = 6  # dimensions along which one tensor is cut; each doubles its pieces' corners


def build_manifest(
    run_id: str, version: PolicyVersion, tensors: Iterable[NamedTensor], tile_bytes: int = TILE_BYTES
) -> Manifest:
    """Describe `tensors` one at a time, and seal them. Raises `InvalidRequest` naming the tensor at fault."""
    return seal_manifest(run_id, version, [describe(tensor, tile_bytes) for tensor in tensors], tile_bytes)


def seal_manifest(
    run_id: str,
    version: PolicyVersion,
    entries: Iterable[TensorEntry],
    tile_bytes: int = TILE_BYTES,
    config: bytes = b"",
) -> Manifest:
    """Return the checked manifest of `entries`; its version carries the root digest."""
    manifest = Manifest(run_id=run_id, version=version, tile_bytes=tile_bytes, tensors=tuple(entries), config=config)
    version = msgspec.structs.replace(version, root=root_digest(manifest))
    manifest = msgspec.structs.replace(manifest, version=version)
    check_manifest(manifest)
    return manifest


def root_digest(manifest: Manifest) -> bytes:
    """Compute the digest, 32 bytes, of the whole version. Ignores `manifest.version.root` itself."""
    root = blake3(derive_key_context=_MANIFEST_CONTEXT)
    version = manifest.version
    for text in (manifest.run_id, version.policy):
        _add_text(root, text)
    root.update(struct.pack("<QQQ", version.version, version.parent, version.step))
    root.update(struct.pack("<QQ", manifest.tile_bytes, len(manifest.tensors)))
    for entry in manifest.tensors:
        _add_text(root, entry.name)
        _add_text(root, entry.dtype)
        for lengths in (entry.shape, entry.start, entry.full):
            root.update(struct.pack(f"<Q{len(lengths)}Q", len(lengths), *lengths))
        root.update(struct.pack("<QQ", entry.size, len(entry.digests)))
        root.update(b"".join(entry.digests))
    return root.digest()


def _add_text(root: blake3, text: str) -> None:
    encoded = text.encode()
    root.update(struct.pack("<Q", len(encoded)))
    root.update(encoded)


def check_manifest(manifest: Manifest, limits: ManifestLimits = ManifestLimits()) -> None:  # noqa: B008 - immutable
    """Refuse a manifest that is malformed, too large or does not match its root. Allocates nothing for its tensors.

    Raises `InvalidRequest` naming the field or tensor, or `ChunkCorrupt` if only the root digest is wrong.
    """
    check_head(manifest.run_id, manifest.version, manifest.tile_bytes)
    if manifest.config:
        check_config(manifest.config)
    if not manifest.tensors:
        raise InvalidRequest("a version has at least one tensor", field="tensors")
    tally = ManifestTally(limits)
    sizes: dict[bytes, int] = {}
    for entry in manifest.tensors:
        check_entry(entry, manifest.tile_bytes, limits)
        tally.add(entry)
        for index, digest in enumerate(entry.digests):
            size = tile_size(entry, index, manifest.tile_bytes)
            if sizes.setdefault(digest, size) != size:
                raise InvalidRequest("gives one tile two sizes", field=entry.name)
    tally.close()
    if root_digest(manifest) != manifest.version.root:
        raise ChunkCorrupt("the manifest does not match its root digest: fetch or send it again")


class ManifestTally:
    """Counts arriving entries against the limits, and checks that pieces form whole tensors.

    `add` raises `InvalidRequest` at the first entry beyond a limit; call `close` after the last entry.
    """

    def __init__(self, limits: ManifestLimits) -> None:
        self._limits = limits
        self._names: set[str] = set()
        self._pieces: list[TensorEntry] = []  # of the last entry's tensor, if the entry is a piece
        self._entries = self._bytes = self._tiles = 0

    def add(self, entry: TensorEntry) -> None:
        if self._pieces and self._pieces[0].name == entry.name:
            self._add_piece(entry)
        else:
            self.close()
            if entry.name in self._names:
                raise InvalidRequest("stands in the manifest twice", field=entry.name)
            self._names.add(entry.name)
            self._pieces = [] if entry.whole else [entry]
        self._entries += 1
        self._bytes += entry.size
        self._tiles += len(entry.digests)
        for count, most, what in (
            (self._entries, self._limits.tensors, "tensors"),
            (self._tiles, self._limits.tiles, "tiles"),
            (self._bytes, self._limits.bytes, "bytes"),
        ):
            if count > most:
                raise InvalidRequest(f"more than {most} {what} in all", field="tensors")

    def close(self) -> None:
        """End the last tensor. Raises `InvalidRequest` if its pieces leave something out or overlap."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            check_pieces(pieces, self._limits.cuts)

    def _add_piece(self, entry: TensorEntry) -> None:
        first = self._pieces[0]
        if (entry.dtype, entry.full) != (first.dtype, first.full):
            raise InvalidRequest("has pieces of different tensors", field=entry.name)
        if len(self._pieces) == self._limits.pieces:
            raise InvalidRequest(f"more than {self._limits.pieces} pieces", field=entry.name)
        self._pieces.append(entry)


def check_head(run_id: str, version: PolicyVersion, tile_bytes: int) -> None:
    """Check the fields that all tensors share. Raises `InvalidRequest` naming the field."""
    check_id(run_id, field="run_id")
    check_id(version.policy, field="version.policy")
    if not 1 <= version.version < 1 << 32:
        raise InvalidRequest("policy versions start at 1 and have 32 bits", field="version.version")
    if not 0 <= version.parent < version.version:
        raise InvalidRequest("must be an earlier version, or 0 for none", field="version.parent")
    if not 0 <= version.step < 1 << 32:
        raise InvalidRequest("must be an unsigned 32-bit number", field="version.step")
    if len(version.root) != DIGEST_BYTES:
        raise InvalidRequest(f"must have {DIGEST_BYTES} bytes", field="version.root")
    if not 1 <= tile_bytes <= TILE_BYTES:
        raise InvalidRequest(f"must be 1 to {TILE_BYTES}", field="tile_bytes")


def check_entry(entry: TensorEntry, tile_bytes: int, limits: ManifestLimits) -> None:
    """Raise `InvalidRequest` unless name, dtype, shape, size and digests of an entry fit together."""
    _check_name(entry.name)
    width = carrier(entry.dtype, field=entry.name).itemsize
    if len(entry.shape) > limits.rank:
        raise InvalidRequest(f"has more than {limits.rank} dimensions", field=entry.name)
    if not all(0 <= length < 1 << 63 for length in entry.shape):
        raise InvalidRequest("has a dimension out of range", field=entry.name)
    size = width * math.prod(entry.shape)
    if entry.start or entry.full:
        _check_piece(entry, limits)
    if size > limits.bytes:
        raise InvalidRequest(f"has more than {limits.bytes} bytes", field=entry.name)
    if size != entry.size:
        raise InvalidRequest(f"{entry.dtype}{list(entry.shape)} has {size} bytes, not {entry.size}", field=entry.name)
    if len(entry.digests) != tile_count(size, tile_bytes):
        raise InvalidRequest(f"{size} bytes are not {len(entry.digests)} tiles of {tile_bytes}", field=entry.name)
    if any(len(digest) != DIGEST_BYTES for digest in entry.digests):
        raise InvalidRequest(f"has a digest that is not {DIGEST_BYTES} bytes", field=entry.name)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidRequest(f"{name[:64]!r} must be made of letters, digits and _ . : -", field="tensors.name")
    if name == _METADATA:
        raise InvalidRequest(f"{name!r} is reserved in safetensors files; rename the tensor", field="tensors.name")


def _check_piece(entry: TensorEntry, limits: ManifestLimits) -> None:
    if not len(entry.start) == len(entry.full) == len(entry.shape):
        raise InvalidRequest("is a piece whose start, shape and tensor have different dimensions", field=entry.name)
    for start, length, full in zip(entry.start, entry.shape, entry.full, strict=True):
        if not (length > 0 and 0 <= start <= full - length and full < 1 << 63):
            raise InvalidRequest("is a piece that does not lie within its tensor", field=entry.name)
    if math.prod(entry.full) > limits.bytes:
        raise InvalidRequest(f"is a piece of more than {limits.bytes} bytes", field=entry.name)


_PATCH_CONTEXT: Final = "ebbtide 2026-11 patch"


def seal_patch(patch: Patch) -> Patch:
    """Return the patch with its root digest."""
    return msgspec.structs.replace(patch, root=patch_root(patch))


def patch_root(patch: Patch) -> bytes:
    """Compute the digest, 32 bytes, of run, both versions with their roots, and all tiles of a patch."""
    root = blake3(derive_key_context=_PATCH_CONTEXT)
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
