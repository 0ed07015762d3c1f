"""Versions of one policy, one made of the other, as a publisher makes them: manifests, patches, blobs, all signed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ebbtide.types.weights import TILE_BYTES, Manifest, Patch, PolicyVersion
from ebbtide.weights import NamedTensor, Signer, named_tensor, seal_manifest, seal_patch, slice_tiles, tile_digest
from ebbtide.weights.version_encoding import Described, encode_version

SEED = b"the seed of the tests' publisher"
SIGNER = Signer(SEED)
#: Elements by tensor: three tiles of bf16, two of fp32, one of bytes.
SIZES = {"layer.bf16": ("BF16", "<u2", 1_200_000), "layer.fp32": ("F32", "<u4", 300_000), "small": ("U8", "|u1", 77)}


class Version(Struct):
    """`patch` leads here from the version before; `blobs` are that patch's, `tiles` the dense ones."""

    manifest: Manifest
    patch: Patch | None
    tensors: tuple[NamedTensor, ...]
    blobs: dict[bytes, bytes]
    tiles: dict[bytes, bytes]

    @property
    def number(self) -> int:
        return self.manifest.version.version


class Line:
    """Versions 1 to `count`; each step changes `share` of the elements by one unit up or down."""

    def __init__(
        self,
        count: int,
        *,
        share: float = 0.02,
        seed: int = 0,
        sizes: Mapping[str, tuple[str, str, int]] = SIZES,
        tile_bytes: int = TILE_BYTES,
        run_id: str = "run",
        signer: Signer | None = SIGNER,
    ) -> None:
        self._chance, self._share = np.random.default_rng(seed), share
        self._tile_bytes, self._run_id, self._signer = tile_bytes, run_id, signer
        arrays = {
            name: (dtype, self._chance.integers(0, np.iinfo(kind).max, size, dtype=kind))
            for name, (dtype, kind, size) in sizes.items()
        }
        self.versions: list[Version] = []
        for _ in range(count):
            self.versions.append(self._publish(arrays))
            arrays = {name: (dtype, self._changed(array)) for name, (dtype, array) in arrays.items()}

    def __getitem__(self, number: int) -> Version:
        return self.versions[number - 1]

    def __iter__(self) -> Any:
        return iter(self.versions)

    def _changed(self, array: Any) -> Any:
        array = array.copy()
        where = self._chance.random(len(array)) < self._share
        array[where] += self._chance.choice(np.array([1, -1 % (1 << 8 * array.itemsize)], array.dtype), where.sum())
        return array

    def _publish(self, arrays: Mapping[str, tuple[str, Any]]) -> Version:
        number = len(self.versions) + 1
        tensors = tuple(named_tensor(name, array, dtype=dtype) for name, (dtype, array) in arrays.items())
        base = self.versions[-1] if self.versions else None
        described = Described(base.tensors, base.manifest.tensors) if base else None
        encoding = encode_version(tensors, described, tile_bytes=self._tile_bytes)
        encoded = encoding.result()
        version = PolicyVersion(policy="policy", version=number, parent=number - 1, step=number)
        manifest = seal_manifest(self._run_id, version, encoded.entries, self._tile_bytes)
        patch = None
        if base is not None:
            patch = seal_patch(
                Patch(
                    run_id=self._run_id,
                    base=base.manifest.version,
                    version=manifest.version,
                    tensors=encoded.patches,
                    changed=encoded.changed,
                    elements=encoded.elements,
                )
            )
        digests = [digest for tensor in encoded.patches for digest in tensor.digests] if base else []
        made = Version(
            manifest=manifest,
            patch=patch,
            tensors=tensors,
            blobs={digest: bytes(encoding.blob(digest)) for digest in digests},
            tiles=tiles_of(tensors, self._tile_bytes),
        )
        return signed(made, self._signer) if self._signer else made


def signed(version: Version, signer: Signer) -> Version:
    patch = signer.sign_patch(version.patch) if version.patch else None
    manifest = signer.sign(version.manifest)
    return Version(manifest, patch, version.tensors, version.blobs, version.tiles)


def tiles_of(tensors: Sequence[NamedTensor], tile_bytes: int) -> dict[bytes, bytes]:
    return {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor, tile_bytes)}
