"""A policy's weights, and steps that change a share of them by one unit in the last place, as small updates do."""

from collections.abc import Iterator

import numpy as np

from ebbtide.weights import NamedTensor

#: Tensors are alike in size, so that each has whole tiles.
TENSORS = 8


class Policy:
    """bf16 bits. `step` changes them in place; do not call it while they are read."""

    def __init__(self, mib: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        elements = (mib << 20) // 2 // TENSORS
        normal = self._rng.standard_normal((TENSORS, elements), dtype=np.float32) * np.float32(0.02)
        self._bits = (normal.view(np.uint32) >> 16).astype(np.uint16)

    @property
    def size(self) -> int:
        return self._bits.nbytes

    def step(self, density: float) -> None:
        """Change about this share of the elements."""
        for row in self._bits:
            chosen = self._rng.random(len(row), dtype=np.float32) < density
            np.add(row, chosen * self._rng.choice(np.array([1, 0xFFFF], np.uint16), len(row)), out=row)

    def tensors(self) -> Iterator[NamedTensor]:
        for index, row in enumerate(self._bits):
            name = f"layers.{index}.weight"
            yield NamedTensor(name=name, dtype="BF16", shape=(len(row),), data=memoryview(row.view(np.uint8)))
