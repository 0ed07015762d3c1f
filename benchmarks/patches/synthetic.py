"""Synthetic steps of any density: tensors whose float32 masters are normal take one step of AdamW.

Betas 0.9 and 0.999, decay 0.1, in its stationary state under gradients that are noise: m / sqrt(v) is then normal with
a standard deviation of sqrt((1 - 0.9) / (1 + 0.9)) = 0.23. Base and new are the masters rounded to bf16, to nearest
even.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.weights.patch.alphabet import Array

#: Standard deviations of the masters.
SPREADS: Final = (0.01, 0.02, 0.04, 0.08)
#: Elements that are made at once, so that making them takes little memory.
_CHUNK: Final = 1 << 20


def to_bf16(values: Array) -> Array:
    """Bit patterns (uint16) of float32 values rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def step(elements: int, spread: float, rate: float, seed: int) -> tuple[Array, Array]:
    """bf16 bit patterns of a tensor before and after a step."""
    rng = np.random.default_rng(seed)
    base, new = np.empty(elements, np.uint16), np.empty(elements, np.uint16)
    for start in range(0, elements, _CHUNK):
        part = slice(start, min(start + _CHUNK, elements))
        size = part.stop - start
        master = rng.standard_normal(size, dtype=np.float32) * np.float32(spread)
        update = rng.standard_normal(size, dtype=np.float32) * np.float32((0.1 / 1.9) ** 0.5)
        base[part] = to_bf16(master)
        new[part] = to_bf16(master - np.float32(rate) * (update + np.float32(0.1) * master))
    return base, new


def rate_for(density: float, spreads: Sequence[float] = SPREADS) -> float:
    """The learning rate at which about this share of the elements of tensors with these spreads changes."""
    low, high = 1e-9, 1.0
    for _ in range(16):
        middle = (low * high) ** 0.5
        changed = np.mean([np.mean(np.not_equal(*step(1 << 18, spread, middle, 0))) for spread in spreads])
        low, high = (middle, high) if changed < density else (low, middle)
    return high
