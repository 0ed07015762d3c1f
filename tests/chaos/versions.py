"""Weights of 24 tiles, the same ones for a step whoever makes them, and what a whole version of them looks like."""

import hashlib
from functools import cached_property
from typing import Final

import numpy as np

from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import FileLayout, build_manifest, named_tensor

TILES: Final = 24
TILE: Final = 1 << 20


class Weights:
    """Of a step: from an even one to the next a small share of the elements changes, and from an odd one all."""

    def __init__(self, step: int) -> None:
        self._step = step

    @cached_property
    def _bits(self) -> np.ndarray:
        rng = np.random.default_rng(self._step // 2)
        bits = rng.integers(0, 1 << 16, (TILES * TILE) // 2, dtype=np.uint16)
        if self._step % 2:
            bits += rng.random(len(bits), dtype=np.float32) < 1 / 32
        return bits

    def tensors(self) -> dict[str, np.ndarray]:
        """Two tensors of 12 tiles."""
        half = len(self._bits) // 2
        return {"a": self._bits[:half], "b": self._bits[half:]}

    @cached_property
    def digest(self) -> str:
        """What a scripted engine makes of the whole file."""
        tensors = [named_tensor(name, array) for name, array in self.tensors().items()]
        layout = FileLayout(build_manifest("r", PolicyVersion(policy="policy", version=1), tensors))
        file = hashlib.blake2b(layout.header)
        for tensor in tensors:
            file.update(tensor.data)
        return file.hexdigest()
