"""zstd frames of known size: what they may take to decode is settled before they are decoded."""

from typing import Final

import zstandard

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.layout import Bytes

_FORM: Final = zstandard.FORMAT_ZSTD1_MAGICLESS
_BARE: Final = {"format": _FORM, "write_content_size": False, "write_checksum": False, "write_dict_id": False}
#: Symbols repeat only by chance: search for repeats as little as zstd can, and let Huffman do the work.
_LETTERS: Final = {"window_log": 17, "hash_log": 6, "min_match": 7, "target_length": 0, "strategy": 1}
#: The window descriptor (RFC 8878, 3.1.1.1.2) of the largest window that we accept, a tile's.
_LARGEST_WINDOW: Final = (TILE_BYTES.bit_length() - 1 - 10) << 3
#: A sample of four slices tells whether a tile is worth compressing whole.
_SLICE: Final = 16 << 10


class Frames:
    """Compresses and decompresses, for one thread at a time. Invariant: no call leaves anything behind for the next."""

    def __init__(self) -> None:
        letters = zstandard.ZstdCompressionParameters(**_BARE, **_LETTERS)
        blocks = zstandard.ZstdCompressionParameters.from_level(3, window_log=20, **_BARE)
        self._letters = zstandard.ZstdCompressor(compression_params=letters)
        self._blocks = zstandard.ZstdCompressor(compression_params=blocks)
        self._reader = zstandard.ZstdDecompressor(max_window_size=TILE_BYTES, format=_FORM)

    def pack_symbols(self, symbols: Array) -> bytes:
        return self._letters.compress(symbols.data)

    def pack_block(self, block: Array, below: int) -> bytes | None:
        """The frame of a block of bytes if it has fewer than `below` bytes, else None; often told from a sample."""
        if len(block) > 8 * _SLICE:
            starts = range(0, len(block) - _SLICE + 1, (len(block) - _SLICE) // 3)
            sample = b"".join(block[start : start + _SLICE].tobytes() for start in starts)
            share = len(self._blocks.compress(sample)) / len(sample)
            if share * len(block) > below * 1.2:
                return None
        frame = self.pack(block)
        return frame if len(frame) < below else None

    def pack(self, block: Array) -> bytes:
        return self._blocks.compress(block.data)

    def unpack(self, frame: Bytes, size: int) -> bytes:
        """The `size` bytes, at most a tile, of a frame. Allocates them and, inside zstd, one window of at most a tile.

        Raises `InvalidRequest` for frames with another size, a larger window, options that we never write, or more
        behind them.
        """
        if len(frame) < 2 or frame[0] != 0 or frame[1] > _LARGEST_WINDOW:
            raise InvalidRequest("has a frame of a form that is never written", field="patch")
        try:
            found = self._reader.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"has a frame that cannot be read ({error})", field="patch") from None
        if len(found) != size:
            raise InvalidRequest(f"has a frame of {len(found)} bytes, not {size}", field="patch")
        return found
