"""Manifests and patches in parts, since those of a large policy exceed a message."""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final, TypeVar

from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import (
    CONFIG_BYTES,
    DIGEST_BYTES,
    KEY_BYTES,
    SIGNATURE_BYTES,
    Manifest,
    Patch,
    PolicyVersion,
    TensorEntry,
    TensorPatch,
)
from ebbtide.weights.manifest.manifest import ManifestLimits, ManifestTally, check_entry, check_head
from ebbtide.weights.manifest.patch_manifest import check_tensor_patch

T = TypeVar("T")

#: Well under the 4 MiB of a message, and small enough to be parsed between heartbeats.
PART_BYTES: Final = 1 << 20


class ManifestPart(Struct, frozen=True, kw_only=True):
    """Some tensors of a manifest; the first part also carries what all of them share."""

    run_id: str = ""
    version: PolicyVersion | None = None
    tile_bytes: int = 0
    publisher: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    tensors: tuple[TensorEntry, ...] = ()
    patch: "PatchPart | None" = None
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES)] = b""
    config_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


class PatchHead(Struct, frozen=True, kw_only=True):
    """All of a `Patch` but its tensors."""

    run_id: str
    base: PolicyVersion
    version: PolicyVersion
    changed: int = 0
    elements: int = 0
    root: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


class PatchPart(Struct, frozen=True, kw_only=True):
    """Some tensors of a patch, in the manifest's order; the first part carries the head."""

    head: PatchHead | None = None
    tensors: tuple[TensorPatch, ...] = ()


def split_manifest(manifest: Manifest, part_bytes: int = PART_BYTES) -> Iterator[ManifestPart]:
    """The manifest in parts of about `part_bytes`, at least one, whole tensors each."""
    for index, tensors in enumerate(_cut(manifest.tensors, _weight, part_bytes)):
        yield _part(manifest, tensors, not index)


def split_patch(patch: Patch, part_bytes: int = PART_BYTES) -> Iterator[PatchPart]:
    """The patch in parts of about `part_bytes`, at least one, whole tensors each."""
    head = PatchHead(
        run_id=patch.run_id,
        base=patch.base,
        version=patch.version,
        changed=patch.changed,
        elements=patch.elements,
        root=patch.root,
        signature=patch.signature,
    )
    for index, tensors in enumerate(_cut(patch.tensors, _patch_weight, part_bytes)):
        yield PatchPart(head=None if index else head, tensors=tuple(tensors))


def _cut(items: Iterable[T], weight: Callable[[T], int], most: int) -> Iterator[list[T]]:
    part: list[T] = []
    pending, first = 0, True
    for item in items:
        size = weight(item)
        if part and pending + size > most:
            yield part
            part, pending, first = [], 0, False
        part.append(item)
        pending += size
    if first or part:
        yield part


def _patch_weight(tensor: TensorPatch) -> int:
    return 16 + (DIGEST_BYTES + 2) * len(tensor.digests) + 5 * len(tensor.sizes)


def _weight(entry: TensorEntry) -> int:
    return 64 + len(entry.name) + 27 * len(entry.shape) + (DIGEST_BYTES + 2) * len(entry.digests)


def _part(manifest: Manifest, tensors: list[TensorEntry], head: bool) -> ManifestPart:
    if not head:
        return ManifestPart(tensors=tuple(tensors))
    return ManifestPart(
        run_id=manifest.run_id,
        version=manifest.version,
        tile_bytes=manifest.tile_bytes,
        publisher=manifest.publisher,
        signature=manifest.signature,
        config=manifest.config,
        config_signature=manifest.config_signature,
        tensors=tuple(tensors),
    )


class ManifestJoiner:
    """Puts parts together again; each is checked as it comes, so that it never holds more than `limits` allow."""

    def __init__(self, limits: ManifestLimits = ManifestLimits()) -> None:  # noqa: B008 - immutable
        self._limits = limits
        self._head: ManifestPart | None = None
        self._tensors: list[TensorEntry] = []
        self._tally = ManifestTally(limits)

    def add(self, part: ManifestPart) -> None:
        """Take the next part. Raises `InvalidRequest` for parts out of order, malformed or beyond the limits."""
        if (self._head is None) != (part.version is not None):
            raise InvalidRequest("the first part carries the version, and no other", field="version")
        if self._head is None and part.version is not None:
            check_head(part.run_id, part.version, part.tile_bytes)
            self._head = part
        tile_bytes = self._head.tile_bytes if self._head else 0
        for entry in part.tensors:
            check_entry(entry, tile_bytes, self._limits)
            self._tally.add(entry)
            self._tensors.append(entry)

    def join(self) -> Manifest:
        """The manifest of all parts, neither root nor signature checked yet.

        Raises `InvalidRequest` if no part came, or not all pieces of a tensor.
        """
        self._tally.close()
        if self._head is None or self._head.version is None:
            raise InvalidRequest("no part of a manifest came", field="version")
        return Manifest(
            run_id=self._head.run_id,
            version=self._head.version,
            tile_bytes=self._head.tile_bytes,
            publisher=self._head.publisher,
            signature=self._head.signature,
            config=self._head.config,
            config_signature=self._head.config_signature,
            tensors=tuple(self._tensors),
        )


class PatchJoiner:
    """Puts a patch's parts together again, holding no more than a patch to `target` has."""

    def __init__(self, target: Manifest) -> None:
        self._target = target
        self._head: PatchHead | None = None
        self._tensors: list[TensorPatch] = []

    @property
    def begun(self) -> bool:
        return self._head is not None

    def add(self, part: PatchPart) -> None:
        """Take the next part. Raises `InvalidRequest` for parts out of order, or other than the target's tensors."""
        if (self._head is None) != (part.head is not None):
            raise InvalidRequest("the first part carries the head, and no other", field="patch.head")
        self._head = self._head or part.head
        for tensor in part.tensors:
            at = len(self._tensors)
            if at == len(self._target.tensors):
                raise InvalidRequest("has more tensors than the manifest", field="patch.tensors")
            check_tensor_patch(self._target.tensors[at], tensor, self._target.tile_bytes)
            self._tensors.append(tensor)

    def join(self) -> Patch:
        """The patch of all parts, not checked yet (`check_patch`). Raises `InvalidRequest` if no part came."""
        if (head := self._head) is None:
            raise InvalidRequest("no part of a patch came", field="patch.head")
        return Patch(
            run_id=head.run_id,
            base=head.base,
            version=head.version,
            changed=head.changed,
            elements=head.elements,
            root=head.root,
            signature=head.signature,
            tensors=tuple(self._tensors),
        )
