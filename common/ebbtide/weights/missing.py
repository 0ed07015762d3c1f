"""Marks with one bit for each blob whether a staged version still lacks it: 100,000 blobs take 12.5 kB of a message."""

from collections.abc import Collection, Container, Sequence

from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights.manifest.patch_manifest import blob_sizes
from ebbtide.weights.tiles import tile_sizes


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
