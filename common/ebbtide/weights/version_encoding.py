"""Encodes a version: the digests of all tiles, and a patch of each changed tile from a base version.

Each tile is first compared with the base's. An unchanged tile is neither hashed nor kept; a changed one is read once
more for its digest. Only some tile patches are kept; the others are encoded again on demand, to the same bytes. So
encoding needs one tile's memory per thread, whatever the version's size. Changes that a GPU found are not sought again.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.weights import TILE_BYTES, TensorEntry, TensorPatch
from ebbtide.weights.patch import SPARSE_HEAD, Array, Kind, TileCodec, TilePatch, read_tile
from ebbtide.weights.tensors import NamedTensor, carrier, unit_width
from ebbtide.weights.tiles import tensor_entry, tensor_size, tile_count, tile_digest

#: For each tile: positions of its changes (in units of the tile, ascending), and their differences (unsigned units; new
#: - base modulo 2^bits). None: only the tile's new bits are known.
Found: TypeAlias = Sequence[tuple[Array, Array] | None]


def apply_found(found: Found, base: Array, into: Array, tile_bytes: int = TILE_BYTES) -> None:
    """Write the new version of `base` to `into` (flat bytes of one length), except for tiles whose changes are None."""
    for number, changes in enumerate(found):
        if changes is not None:
            tile = slice(number * tile_bytes, (number + 1) * tile_bytes)
            np.copyto(into[tile], base[tile])
            positions, differences = changes
            into[tile].view(differences.dtype)[positions] += differences


class Described(Struct, frozen=True):
    """The bits of a version, or of a rank's share of it, and their manifest entries."""

    tensors: tuple[NamedTensor, ...]
    entries: tuple[TensorEntry, ...]


class Encoded(Struct, frozen=True, kw_only=True):
    """The parts of manifest and patch, in the order of the tensors."""

    entries: tuple[TensorEntry, ...]
    patches: tuple[TensorPatch, ...]  # without a base: all tiles are dense
    changed: int  # elements; all of them without a base
    elements: int


class _Tile(Struct, frozen=True):
    digest: bytes
    size: int = 0  # of the blob in bytes; 0: the tile is the base's
    blob: bytes = b""  # the blob's digest


class Encoding:
    """Encodes one version; several threads can call `work`, and later `blob`, at once.

    Invariant: the tensors and the base's do not change while this is in use. One thread encodes a tile and alone writes
    its slot. Tile patches are kept up to about `keep_bytes` in all.
    """

    def __init__(
        self,
        tensors: Sequence[NamedTensor],
        base: Described | None = None,
        *,
        tile_bytes: int = TILE_BYTES,
        keep_bytes: int = 0,
        found: Sequence[Found | None] = (),
    ) -> None:
        """Take, in `found`, the known changes of each tensor since the base (None: unknown).

        Raises `InvalidRequest` naming a tensor whose bytes do not fill its shape, or that the base does not have.
        """
        self._tensors, self._tile_bytes, self._keep_bytes = tensors, tile_bytes, keep_bytes
        self._sizes = [tensor_size(tensor) for tensor in tensors]
        self._base, self._found = base, found
        if base is not None:
            _check_geometry(tensors, base.entries, tile_bytes)
        counts = [tile_count(size, tile_bytes) for size in self._sizes]
        self._firsts = list(accumulate(counts, initial=0))  # the number of each tensor's first tile
        self._slots: list[_Tile | None] = [None] * self._firsts[-1]
        self._changed: list[int] = []
        self._tickets = count()
        self._codecs: dict[int, list[TileCodec]] = {1: [], 2: [], 4: []}
        self._kept: dict[bytes, bytes] = {}
        self._kept_bytes = 0
        self._places: dict[bytes, int] = {}

    def work(self) -> None:
        """Encode tiles until none is left to begin. The `result` is there once all calls have returned."""
        changed = 0
        while (number := next(self._tickets)) < len(self._slots):
            changed += self._encode(number)
        self._changed.append(changed)

    def stop(self) -> None:
        """Make `work` return soon, without a result."""
        self._tickets = count(len(self._slots))

    def result(self) -> Encoded:
        tiles = [tile for tile in self._slots if tile is not None]
        if len(tiles) != len(self._slots):
            raise InvalidRequest("has tiles that were not encoded", field="tensors")
        entries, patches, elements = [], [], 0
        for tensor, size, first, end in zip(self._tensors, self._sizes, self._firsts, self._firsts[1:], strict=False):
            own = tiles[first:end]
            entries.append(tensor_entry(tensor, size, [tile.digest for tile in own]))
            blobs = tuple(tile.blob for tile in own if tile.size)
            patches.append(TensorPatch(sizes=tuple(tile.size for tile in own), digests=blobs))
            elements += size // carrier(tensor.dtype).itemsize
        return Encoded(entries=tuple(entries), patches=tuple(patches), changed=sum(self._changed), elements=elements)

    def has(self, digest: bytes) -> bool:
        """Tell whether `digest` is one of the tile patches or dense tiles, once there is a result."""
        if not self._places:
            for number, tile in enumerate(self._slots):
                if tile is not None:
                    self._places.setdefault(tile.digest, number)
                    self._places.setdefault(tile.blob, number)
            self._places.pop(b"", None)
        return digest in self._places

    def blob(self, digest: bytes) -> bytes | memoryview:
        """Return a tile patch, or a dense tile (a view of the tensor), by its digest. Raises `NotFound`."""
        if (kept := self._kept.get(digest)) is not None:
            return kept
        if not self.has(digest):
            raise NotFound(f"{digest.hex()} is no blob of this version")
        number = self._places[digest]
        tile, (tensor, start, stop) = self._slots[number], self._range(number)
        if tile is None or tile.digest == digest:
            return self._tensors[tensor].data[start:stop]
        return self._patch(tensor, start, stop)[0]

    def _encode(self, number: int) -> int:
        """Fill a tile's slot; return how many of its elements changed."""
        tensor, start, stop = self._range(number)
        data = self._tensors[tensor].data[start:stop]
        if self._base is None:
            digest = tile_digest(data)
            self._slots[number] = _Tile(digest, len(data), digest)
            return len(data) // carrier(self._tensors[tensor].dtype).itemsize
        patch, changed = self._patch(tensor, start, stop)
        if not changed:
            self._slots[number] = _Tile(self._base.entries[tensor].digests[number - self._firsts[tensor]])
            return 0
        digest = tile_digest(data)
        if len(patch) >= len(data):
            self._slots[number] = _Tile(digest, len(data), digest)
        else:
            blob = tile_digest(patch)
            if self._kept_bytes + len(patch) <= self._keep_bytes:
                self._kept_bytes += len(patch)  # a soft bound: threads can miss each other's few bytes
                self._kept[blob] = patch
            self._slots[number] = _Tile(digest, len(patch), blob)
        return changed

    def _patch(self, tensor: int, start: int, stop: int) -> tuple[bytes, int]:
        """Return the tile patch from the base, and the number of elements that it changes."""
        if self._base is None:
            raise NotFound("there is no base to patch")
        dtype = self._tensors[tensor].dtype
        width, itemsize = unit_width(dtype), carrier(dtype).itemsize
        base = np.frombuffer(self._base.tensors[tensor].data[start:stop], f"<u{width}")
        new = np.frombuffer(self._tensors[tensor].data[start:stop], f"<u{width}")
        try:
            codec = self._codecs[width].pop()
        except IndexError:
            codec = TileCodec(width, self._tile_bytes)
        patch = None
        if self._found and (found := self._found[tensor]) and (changes := found[start // self._tile_bytes]):
            patch = codec.encode_changes(*changes, len(new))
        if patch is None:
            patch = codec.encode(base, new)
        self._codecs[width].append(codec)
        return patch, _changed(read_tile(patch, width, len(new)), base, new, itemsize)

    def _range(self, number: int) -> tuple[int, int, int]:
        """Return the tensor of a tile, and its first byte and end there."""
        tensor = bisect_right(self._firsts, number) - 1
        start = (number - self._firsts[tensor]) * self._tile_bytes
        return tensor, start, min(start + self._tile_bytes, self._sizes[tensor])


def encode_version(
    tensors: Sequence[NamedTensor], base: Described | None = None, *, tile_bytes: int = TILE_BYTES, keep_bytes: int = 0
) -> Encoding:
    """Encode `tensors` against `base` in this thread. Raises as `Encoding` does."""
    encoding = Encoding(tensors, base, tile_bytes=tile_bytes, keep_bytes=keep_bytes)
    encoding.work()
    return encoding


def same_pieces(tensors: Sequence[NamedTensor], entries: Sequence[TensorEntry]) -> bool:
    """Tell whether tensors and entries agree in names, dtypes, shapes and pieces, as a patch requires."""
    return len(tensors) == len(entries) and all(map(_alike, tensors, entries))


def _alike(tensor: NamedTensor, entry: TensorEntry) -> bool:
    return tensor_entry(tensor, entry.size, entry.digests) == entry


def _check_geometry(tensors: Sequence[NamedTensor], entries: Sequence[TensorEntry], tile_bytes: int) -> None:
    if len(tensors) != len(entries):
        raise InvalidRequest(f"{len(tensors)} are not the {len(entries)} of the base", field="tensors")
    for tensor, entry in zip(tensors, entries, strict=True):
        if not _alike(tensor, entry) or tile_count(entry.size, tile_bytes) != len(entry.digests):
            raise InvalidRequest("differs from the base's in name, dtype, shape or piece", field=tensor.name)
        if tile_bytes % carrier(tensor.dtype).itemsize:
            raise InvalidRequest(f"must be whole elements of {tensor.name} ({tensor.dtype})", field="tile_bytes")


def _changed(tile: TilePatch, base: Array, new: Array, itemsize: int) -> int:
    """Count changed elements; compares again only if most of the tile changed or an element has two units."""
    if tile.kind == Kind.SAME:
        return 0
    if tile.kind == Kind.SPARSE and tile.width == itemsize:
        return int(SPARSE_HEAD.unpack_from(tile.payload)[0])
    elements = np.dtype(f"<u{itemsize}")
    return int(np.count_nonzero(base.view(elements) != new.view(elements)))
