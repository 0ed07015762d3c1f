"""Tiles put together into tensors."""

import numpy as np

from ebbtide.errors import VersionUnavailable
from ebbtide.types.weights import Manifest
from ebbtide.weights.manifest import Limits, check_manifest
from ebbtide.weights.tensors import NamedTensor
from ebbtide.weights.tiles import check_tile, tile_size


class Assembly:
    """The tensors of one manifest while their tiles arrive.

    Invariant: a byte of a buffer is written only from a tile that matched its digest, and `tensors()` gives nothing
    until every tile is in place. One task at a time may call `place`. Nothing outlives the process.
    """

    def __init__(self, manifest: Manifest, limits: Limits = Limits()) -> None:  # noqa: B008 - immutable
        """Check `manifest`, then allocate its tensors. Raises as `check_manifest` does."""
        check_manifest(manifest, limits)
        self.manifest = manifest
        self._buffers = [np.empty(entry.size, dtype=np.uint8) for entry in manifest.tensors]
        self._wanted: dict[bytes, list[memoryview]] = {}
        for entry, buffer in zip(manifest.tensors, self._buffers, strict=True):
            flat = buffer.data
            for index, digest in enumerate(entry.digests):
                start = index * manifest.tile_bytes
                end = start + tile_size(entry, index, manifest.tile_bytes)
                self._wanted.setdefault(digest, []).append(flat[start:end])

    @property
    def missing(self) -> list[bytes]:
        """Digests still wanted, in manifest order."""
        return list(self._wanted)

    @property
    def complete(self) -> bool:
        return not self._wanted

    def place(self, digest: bytes, data: bytes | memoryview) -> None:
        """Verify a tile and copy it to all its places; one placed before is left alone.

        Raises `ChunkCorrupt` if the data is not the tile, and writes nothing then.
        """
        targets = self._wanted.get(digest)
        check_tile(digest, data, len(targets[0]) if targets else None)
        for target in targets or ():
            target[:] = data
        self._wanted.pop(digest, None)

    def tensors(self) -> dict[str, NamedTensor]:
        """The tensors by name. Raises `VersionUnavailable` while tiles are missing."""
        if self._wanted:
            raise VersionUnavailable(f"{len(self._wanted)} tiles have not come yet")
        return {
            entry.name: NamedTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=buffer.data)
            for entry, buffer in zip(self.manifest.tensors, self._buffers, strict=True)
        }
