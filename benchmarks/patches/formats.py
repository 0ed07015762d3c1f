"""What a pair of versions takes in each format that is in use, and the entropy of its change."""

from typing import Any, Final

import numpy as np
import zstandard

from benchmarks.patches.pairs import Pair, Piece
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.tile_codec import TileCodec
from ebbtide.weights.patch.tile_format import Kind, unit_width

#: The formats that a patch is compared with.
OTHERS: Final = ("dense", "coo", "astraflow", "xor_zstd_1", "xor_zstd_3")
#: AstraFlow's format, a 64-bit global index and a value for each change, has one header for all tensors.
_ASTRAFLOW_HEADER: Final = 16


def sizes(pair: Pair) -> dict[str, Any]:
    """Bytes by format over all tensors, `bound` the order-0 entropy's; elements, changes and tiles of each kind.

    Raises `SystemExit` if a patch does not give the new version.
    """
    row: dict[str, Any] = dict.fromkeys(("dense", "bound", "patch", *OTHERS[1:], "elements", "changes"), 0)
    codecs = {width: TileCodec(width) for width in {unit_width(piece.dtype) for piece in pair.pieces}}
    row["astraflow"] = _ASTRAFLOW_HEADER
    kinds = dict.fromkeys((kind.name for kind in Kind), 0)
    for piece in pair.pieces:
        itemsize = carrier(piece.dtype).itemsize
        changes = int(np.count_nonzero(piece.base != piece.new))
        row["elements"] += piece.new.nbytes // itemsize
        row["changes"] += changes
        row["dense"] += piece.new.nbytes
        row["bound"] += bound(piece.base, piece.new)
        row["coo"] += changes * (4 + itemsize)
        row["astraflow"] += changes * (8 + itemsize)
        row["patch"] += patched(piece, codecs[unit_width(piece.dtype)], kinds)
        changed_bits = (piece.base ^ piece.new).data
        for level in (1, 3):
            row[f"xor_zstd_{level}"] += len(zstandard.ZstdCompressor(level=level).compress(changed_bits))
    row["density"] = row["changes"] / row["elements"]
    dtype = max(pair.pieces, key=lambda piece: piece.new.nbytes).dtype
    return {"kind": pair.kind, "label": pair.label, "dtype": dtype, **row, "tiles": kinds}


def patched(piece: Piece, codec: TileCodec, kinds: dict[str, int]) -> int:
    """Bytes of the piece's tile patches, each of which is applied, and must be exact.

    As publishers send them: none for a tile that stayed, and the tile itself where its patch is no smaller. The digests
    by which tiles of any kind are listed are not in it, as they are not in other formats.
    """
    taken, units = 0, TILE_BYTES // unit_width(piece.dtype)
    for start in range(0, len(piece.new), units):
        base, new = (np.ascontiguousarray(array[start : start + units]) for array in (piece.base, piece.new))
        patch, target = codec.encode(base, new), base.copy()
        kind = Kind(patch[1])
        kinds[kind.name] += 1
        codec.apply(patch, target)
        if not np.array_equal(target, new):
            raise SystemExit(f"{piece.name}: the applied patch does not give the new weights")
        taken += min(len(patch), new.nbytes) if kind != Kind.SAME else 0
    return taken


def bound(base: Array, new: Array) -> float:
    """Bytes of the order-0 entropy: positions as independent draws at the tensor's density, differences by their
    histogram. Where nearly every difference is another one, as in float32, the histogram knows them all: no code does.
    """
    differences = (new - base)[base != new]
    if not len(differences):
        return 0.0
    _, histogram = np.unique(differences, return_counts=True)
    return (entropy(histogram) + entropy(np.array([len(differences), len(base) - len(differences)]))) / 8


def entropy(histogram: Array) -> float:
    """Bits that all draws of a histogram take together."""
    counts = histogram[histogram > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())
