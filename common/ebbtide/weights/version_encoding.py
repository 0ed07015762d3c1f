"""A version as its publisher makes it: digests of all tiles, and what changed in each since a base version.

A tile is compared with the base's before anything else is done with it: one that stayed is neither hashed nor kept, and
one that changed is read once more for its digest. Tile patches beyond what may be kept are made again when asked for,
which gives the same bytes: so a version is encoded in the memory of one tile for each thread, whatever its size. What a
GPU has found to have changed is not looked for again; it is kept while the version is encoded.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.weights import TILE_BYTES, TensorEntry, TensorPatch
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.found_changes import Found
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.tile_codec import TileCodec
from ebbtide.weights.patch.tile_format import SPARSE_HEAD, Kind, TilePatch, read_tile, unit_width
from ebbtide.weights.tensors import NamedTensor
from ebbtide.weights.tiles import tensor_size, tile_count, tile_digest


class Described(Struct, frozen=True):
    """The bits of a version, or of a rank's share of it, and what its manifest says of them."""

    tensors: tuple[NamedTensor, ...]
    entries: tuple[TensorEntry, ...]


class Encoded(Struct, frozen=True, kw_only=True):
    """What goes into manifest and patch, in the order of the tensors. Without a base, all tiles of `patches` are dense
    and all elements have changed."""

    entries: tuple[TensorEntry, ...]
    patches: tuple[TensorPatch, ...]
    changed: int
    elements: int


class _Tile(Struct, frozen=True):
    digest: bytes
    size: int = 0  # of the blob: 0 for none
    blob: bytes = b""  # its digest


class Encoding:
    """One version while it is encoded; `work`, and later `blob`, may be called by several threads at once.

    Invariant: `tensors` and the base's stay as they are for as long as this is used. A tile is encoded by one thread,
    which alone writes its slot. Tile patches are kept up to about `keep_bytes` in all.
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
        """`found`: of each tensor, if anything is known, how it differs from the base.

        Raises `InvalidRequest` naming the tensor whose bytes do not fill it, or that is not one of the base's.
        """
        self._tensors, self._tile_bytes, self._keep_bytes = tensors, tile_bytes, keep_bytes
        self._sizes = [tensor_size(tensor) for tensor in tensors]
        self._base, self._found = base, found
        if base is not None:
            _check_geometry(tensors, base.entries, tile_bytes)
        counts = [tile_count(size, tile_bytes) for size in self._sizes]
        self._firsts = list(accumulate(counts, initial=0))  # of each tensor: the number of its first tile
        self._slots: list[_Tile | None] = [None] * self._firsts[-1]
        self._changed: list[int] = []
        self._tickets = count()
        self._codecs: dict[int, list[TileCodec]] = {1: [], 2: [], 4: []}
        self._kept: dict[bytes, bytes] = {}
        self._kept_bytes = 0
        self._places: dict[bytes, int] = {}

    def work(self) -> None:
        """Encode tiles until none is left to begin. Once all calls have returned, there is a `result`."""
        changed = 0
        while (number := next(self._tickets)) < len(self._slots):
            changed += self._encode(number)
        self._changed.append(changed)

    def stop(self) -> None:
        """Have `work` end soon; there will be no result."""
        self._tickets = count(len(self._slots))

    def result(self) -> Encoded:
        tiles = [tile for tile in self._slots if tile is not None]
        if len(tiles) != len(self._slots):
            raise InvalidRequest("has tiles that were not encoded", field="tensors")
        entries, patches, elements = [], [], 0
        for tensor, size, first, end in zip(self._tensors, self._sizes, self._firsts, self._firsts[1:], strict=False):
            own = tiles[first:end]
            entries.append(
                TensorEntry(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    size=size,
                    digests=tuple(tile.digest for tile in own),
                    start=tensor.start,
                    full=tensor.full,
                )
            )
            blobs = tuple(tile.blob for tile in own if tile.size)
            patches.append(TensorPatch(sizes=tuple(tile.size for tile in own), digests=blobs))
            elements += size // carrier(tensor.dtype).itemsize
        return Encoded(entries=tuple(entries), patches=tuple(patches), changed=sum(self._changed), elements=elements)

    def has(self, digest: bytes) -> bool:
        """Whether `digest` is one of the tile patches or dense tiles, once there is a result."""
        if not self._places:
            for number, tile in enumerate(self._slots):
                if tile is not None:
                    self._places.setdefault(tile.digest, number)
                    self._places.setdefault(tile.blob, number)
            self._places.pop(b"", None)
        return digest in self._places

    def blob(self, digest: bytes) -> bytes | memoryview:
        """A tile patch, or a dense tile (a view of the tensor), by its digest. Raises `NotFound`."""
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
                self._kept_bytes += len(patch)  # threads may miss each other's few bytes: it is no hard bound
                self._kept[blob] = patch
            self._slots[number] = _Tile(digest, len(patch), blob)
        return changed

    def _patch(self, tensor: int, start: int, stop: int) -> tuple[bytes, int]:
        """The tile patch from the base, and how many elements it changes."""
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
        """The tensor of a tile, and its first byte and end there."""
        tensor = bisect_right(self._firsts, number) - 1
        start = (number - self._firsts[tensor]) * self._tile_bytes
        return tensor, start, min(start + self._tile_bytes, self._sizes[tensor])


def encode_version(
    tensors: Sequence[NamedTensor],
    base: Described | None = None,
    *,
    tile_bytes: int = TILE_BYTES,
    keep_bytes: int = 0,
) -> Encoding:
    """`tensors` encoded against `base` by this thread alone. Raises as `Encoding` does."""
    encoding = Encoding(tensors, base, tile_bytes=tile_bytes, keep_bytes=keep_bytes)
    encoding.work()
    return encoding


def same_pieces(tensors: Sequence[NamedTensor], entries: Sequence[TensorEntry]) -> bool:
    """Whether tensors and entries agree in names, dtypes, shapes and pieces, so that a patch can lead to them."""
    return len(tensors) == len(entries) and all(map(_alike, tensors, entries))


def _alike(tensor: NamedTensor, entry: TensorEntry) -> bool:
    return (tensor.name, tensor.dtype, tensor.shape, tensor.start, tensor.full) == (
        entry.name,
        entry.dtype,
        entry.shape,
        entry.start,
        entry.full,
    )


def _check_geometry(tensors: Sequence[NamedTensor], entries: Sequence[TensorEntry], tile_bytes: int) -> None:
    if len(tensors) != len(entries):
        raise InvalidRequest(f"{len(tensors)} are not the {len(entries)} of the base", field="tensors")
    for tensor, entry in zip(tensors, entries, strict=True):
        if not _alike(tensor, entry) or tile_count(entry.size, tile_bytes) != len(entry.digests):
            raise InvalidRequest("is not as it was in the base", field=tensor.name)
        if tile_bytes % carrier(tensor.dtype).itemsize:
            raise InvalidRequest(f"must be whole elements of {tensor.name} ({tensor.dtype})", field="tile_bytes")


def _changed(tile: TilePatch, base: Array, new: Array, itemsize: int) -> int:
    """Only where most of a tile changed, or an element is two units, is it looked at once more."""
    if tile.kind == Kind.SAME:
        return 0
    if tile.kind == Kind.SPARSE and tile.width == itemsize:
        return int(SPARSE_HEAD.unpack_from(tile.payload)[0])
    elements = np.dtype(f"<u{itemsize}")
    return int(np.count_nonzero(base.view(elements) != new.view(elements)))
