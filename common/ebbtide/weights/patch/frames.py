"""Packs and unpacks zstd frames of known size, so that the memory to decode one is settled beforehand."""

import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import zstandard

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.tile_format import Bytes

_FORM: Final = zstandard.FORMAT_ZSTD1_MAGICLESS
_BARE: Final = {"format": _FORM, "write_content_size": True, "write_checksum": False, "write_dict_id": False}
#: So large that every frame is a single segment, which decodes without a window.
_WINDOW_LOG: Final = TILE_BYTES.bit_length() - 1
#: Symbols repeat only by chance: these settings search for repeats as little as zstd can and leave the work to Huffman.
_LETTERS: Final = {"window_log": _WINDOW_LOG, "hash_log": 6, "min_match": 7, "target_length": 0, "strategy": 1}
#: Units of each of the four slices in the sample that decides whether to compress a whole tile.
_SLICE: Final = 4096


class Frames:
    """Compresses and decompresses, for one thread at a time. Invariant: calls leave no state for later calls."""

    def __init__(self) -> None:
        letters = zstandard.ZstdCompressionParameters(**_BARE, **_LETTERS)
        blocks = zstandard.ZstdCompressionParameters.from_level(3, window_log=_WINDOW_LOG, **_BARE)
        samples = zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG, **_BARE)
        self._letters = zstandard.ZstdCompressor(compression_params=letters)
        self._samples = zstandard.ZstdCompressor(compression_params=samples)
        self._blocks = zstandard.ZstdCompressor(compression_params=blocks)
        self._reader = zstandard.ZstdDecompressor(max_window_size=TILE_BYTES, format=_FORM)

    def pack_symbols(self, symbols: Array) -> bytes:
        return self._letters.compress(symbols.data)

    def pack_below(self, block: Callable[[slice], Array], units: int, below: int) -> bytes | None:
        """Return the frame of a block of units if it has fewer than `below` bytes, else None; mostly by a sample."""
        if units > 8 * _SLICE:
            starts = range(0, units - _SLICE + 1, (units - _SLICE) // 3)
            sample = np.concatenate([block(slice(start, start + _SLICE)) for start in starts])
            if len(self._samples.compress(sample.view(np.uint8).data)) * units > 1.2 * below * len(sample):
                return None
        frame = self.pack(block(slice(None)))
        return frame if len(frame) < below else None

    def pack(self, block: Array) -> bytes:
        return self._blocks.compress(block.view(np.uint8).data)

    def unpack(self, frame: Bytes, size: int) -> bytes:
        """Return the `size` bytes, at most a tile, of a frame, and allocate nothing else.

        Raises `InvalidRequest` for frames of another size, with options that we never write, or with trailing data.
        """
        header = _header(size)
        if frame[: len(header)] != header:  # zstd would allocate the size that the frame states
            raise InvalidRequest(f"has a frame that is not of {size} bytes", field="patch")
        try:
            found = self._reader.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"has a frame that cannot be read ({error})", field="patch") from None
        if len(found) != size:
            raise InvalidRequest(f"has a frame of {len(found)} bytes, not {size}", field="patch")
        return found


def _header(size: int) -> bytes:
    """Return the only header that we write for a frame of `size` bytes: a single segment (RFC 8878, 3.1.1.1)."""
    if size < 256:
        return struct.pack("<BB", 0x20, size)
    return struct.pack("<BH", 0x60, size - 256) if size < 65536 + 256 else struct.pack("<BI", 0xA0, size)
