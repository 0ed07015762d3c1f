"""What each thread applies patches with.

Invariant: nothing here is seen by two threads, and nothing of it outlives the tile that is being made.
"""

import threading
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.weights.geometry.file_layout import Bytes

if TYPE_CHECKING:
    from ebbtide.weights.patch.tile_codec import TileCodec


class Own(threading.local):
    """Made anew in every thread that uses it."""

    def __init__(self, tile_bytes: int) -> None:
        self.bytes: Bytes = np.empty(tile_bytes, np.uint8)
        self._codecs: dict[int, TileCodec] = {}

    def codec(self, width: int) -> "TileCodec":
        """For units of `width` bytes. Its modules come late, with the first patch."""
        if width not in self._codecs:
            from ebbtide.weights.patch.tile_codec import TileCodec

            self._codecs[width] = TileCodec(width)
        return self._codecs[width]
