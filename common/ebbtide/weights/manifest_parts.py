"""Cuts manifests and patches into parts for the wire, and marks the blobs that a staged version still lacks."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

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
from ebbtide.weights.manifest import (
    ManifestLimits,
    ManifestTally,
    blob_sizes,
    check_entry,
    check_head,
    check_tensor_patch,
)
from ebbtide.weights.tiles import tile_sizes

T = TypeVar("T")

#: Well below a message's limit of 4 MiB, and small enough to be parsed between heartbeats.
PART_BYTES: Final = 1 << 20


class ManifestPart(Struct, frozen=True, kw_only=True):
    """Some tensors of a manifest; the first part also carries the manifest's other fields."""

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
    """The fields of a `Patch` except its tensors."""

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
    """Yield the manifest in at least one part of about `part_bytes`, whole tensors each."""
    head = _fields(manifest)
    for index, tensors in enumerate(_cut(manifest.tensors, _entry_bytes, part_bytes)):
        yield ManifestPart(tensors=tuple(tensors), **({} if index else head))


def split_patch(patch: Patch, part_bytes: int = PART_BYTES) -> Iterator[PatchPart]:
    """Yield the patch in at least one part of about `part_bytes`, whole tensors each."""
    head = PatchHead(**_fields(patch))
    for index, tensors in enumerate(_cut(patch.tensors, _patch_bytes, part_bytes)):
        yield PatchPart(head=None if index else head, tensors=tuple(tensors))


def _fields(whole: Manifest | Patch | ManifestPart | PatchHead) -> dict[str, Any]:
    """Return the fields that travel once."""
    return {name: value for name, value in asdict(whole).items() if name not in {"tensors", "patch"}}


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


def _patch_bytes(tensor: TensorPatch) -> int:
    return 16 + (DIGEST_BYTES + 2) * len(tensor.digests) + 5 * len(tensor.sizes)


def _entry_bytes(entry: TensorEntry) -> int:
    return 64 + len(entry.name) + 27 * len(entry.shape) + (DIGEST_BYTES + 2) * len(entry.digests)


class ManifestJoiner:
    """Joins the parts of a manifest, checking each as it arrives. It never holds more than `limits` allow."""

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
        """Return the manifest, its root and signature not checked yet.

        Raises `InvalidRequest` if no part came, or if pieces of a tensor are missing.
        """
        self._tally.close()
        if self._head is None:
            raise InvalidRequest("no part of a manifest came", field="version")
        return Manifest(tensors=tuple(self._tensors), **_fields(self._head))


class PatchJoiner:
    """Joins the parts of a patch to `target`. It never holds more tensors than `target` has."""

    def __init__(self, target: Manifest) -> None:
        self._target = target
        self._head: PatchHead | None = None
        self._tensors: list[TensorPatch] = []

    @property
    def begun(self) -> bool:
        return self._head is not None

    def add(self, part: PatchPart) -> None:
        """Take the next part. Raises `InvalidRequest` if it is out of order or does not fit the target's tensors."""
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
        """Return the patch, to be checked by `check_patch`. Raises `InvalidRequest` if no part came."""
        if self._head is None:
            raise InvalidRequest("no part of a patch came", field="patch.head")
        return Patch(tensors=tuple(self._tensors), **_fields(self._head))


def staged_sizes(manifest: Manifest, patch: Patch | None) -> dict[bytes, int]:
    """Return every distinct blob that a staged version needs with its bytes, in the order of first use: the patch's
    blobs, or without a patch all dense tiles."""
    return tile_sizes(manifest) if patch is None else blob_sizes(patch)


def mark_missing(blobs: Collection[bytes], held: Container[bytes]) -> bytes:
    """Return the bits of the blobs that are not held, as `PutTilesResponse` carries them."""
    bits = bytearray((len(blobs) + 7) // 8)
    for at, digest in enumerate(blobs):
        if digest not in held:
            bits[at // 8] |= 1 << at % 8
    return bytes(bits.rstrip(b"\0"))


def read_missing(blobs: Collection[bytes], answers: Sequence[bytes]) -> list[bytes]:
    """Return the blobs that every answer calls missing, in order. Staged blobs never go, so the last answer would be
    enough; but callers that put at the same time do not know which one was last."""
    return [
        digest
        for at, digest in enumerate(blobs)
        if all(at // 8 < len(bits) and bits[at // 8] >> at % 8 & 1 for bits in answers)
    ]
