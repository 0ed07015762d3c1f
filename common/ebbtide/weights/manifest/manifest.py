"""Builds, seals and checks manifests: the tensors of one policy version and their tiles' digests, under a root digest.

The root is BLAKE3 (256 bits, in key derivation mode, with our own context) over a canonical encoding of run, version,
parent, step and all tensors in order. Every field is fixed-width little-endian or preceded by its length, so no two
manifests share an encoding. The root does not cover the model's configuration, which has its own signature, so readers
that do not know that field compute the same root.
"""

import math
import re
import struct
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.types.ids import check_id
from ebbtide.types.weights import DIGEST_BYTES, TILE_BYTES, Manifest, PolicyVersion, TensorEntry
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.geometry.pieces import check_pieces
from ebbtide.weights.model_config import check_config
from ebbtide.weights.tensors import NamedTensor
from ebbtide.weights.tiles import describe, tile_count, tile_size

_CONTEXT: Final = "ebbtide 2026-11 manifest"
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
    root = blake3(derive_key_context=_CONTEXT)
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
