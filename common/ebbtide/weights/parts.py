"""Manifests in parts, since one of a large policy exceeds a message."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import DIGEST_BYTES, Manifest, PolicyVersion, TensorEntry
from ebbtide.weights.manifest import Limits, Tally, check_entry, check_head

#: Well under the 4 MiB of a message, and small enough to be parsed between heartbeats.
PART_BYTES: Final = 1 << 20


class ManifestPart(Struct, frozen=True, kw_only=True):
    """Some tensors of a manifest; the first part also carries what all of them share."""

    run_id: str = ""
    version: PolicyVersion | None = None
    tile_bytes: int = 0
    tensors: tuple[TensorEntry, ...] = ()


def split_manifest(manifest: Manifest, part_bytes: int = PART_BYTES) -> Iterator[ManifestPart]:
    """The manifest in parts of about `part_bytes`, at least one, whole tensors each."""
    tensors: list[TensorEntry] = []
    head, pending = True, 0
    for entry in manifest.tensors:
        weight = _weight(entry)
        if tensors and pending + weight > part_bytes:
            yield _part(manifest, tensors, head)
            head, pending, tensors = False, 0, []
        tensors.append(entry)
        pending += weight
    if head or tensors:
        yield _part(manifest, tensors, head)


def _weight(entry: TensorEntry) -> int:
    return 64 + len(entry.name) + 9 * len(entry.shape) + (DIGEST_BYTES + 2) * len(entry.digests)


def _part(manifest: Manifest, tensors: list[TensorEntry], head: bool) -> ManifestPart:
    if not head:
        return ManifestPart(tensors=tuple(tensors))
    return ManifestPart(
        run_id=manifest.run_id, version=manifest.version, tile_bytes=manifest.tile_bytes, tensors=tuple(tensors)
    )


class ManifestJoiner:
    """Puts parts together again; each is checked as it comes, so that it never holds more than `limits` allow."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - immutable
        self._limits = limits
        self._head: ManifestPart | None = None
        self._tensors: list[TensorEntry] = []
        self._tally = Tally(limits)

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
        """The manifest of all parts, its root not yet checked. Raises `InvalidRequest` if no part came."""
        if self._head is None or self._head.version is None:
            raise InvalidRequest("no part of a manifest came", field="version")
        return Manifest(
            run_id=self._head.run_id,
            version=self._head.version,
            tile_bytes=self._head.tile_bytes,
            tensors=tuple(self._tensors),
        )
