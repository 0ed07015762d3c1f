"""Synthetic steps of any density: tensors whose float32 masters are normal take one step of AdamW.

Betas 0.9 and 0.999, decay 0.1, in its stationary state under gradients that are noise: m / sqrt(v) is then normal with
a standard deviation of sqrt((1 - 0.9) / (1 + 0.9)) = 0.23. Base and new are the masters rounded to bf16, to nearest
even.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ebbtide.weights.patch import Array

#: Standard deviations of the masters.
SPREADS: Final = (0.01, 0.02, 0.04, 0.08)
#: Elements that are made at once, so that making them takes little memory.
_CHUNK: Final = 1 << 20
#: Elements of each tensor by which rates are chosen.
_SAMPLE: Final = 1 << 19


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
        master, update = _drawn(rng, part.stop - part.start, spread)
        base[part] = to_bf16(master)
        new[part] = to_bf16(master - np.float32(rate) * update)
    return base, new


def _drawn(rng: np.random.Generator, size: int, spread: float) -> tuple[Array, Array]:
    """Masters, and their update at a rate of 1."""
    master = rng.standard_normal(size, dtype=np.float32) * np.float32(spread)
    update = rng.standard_normal(size, dtype=np.float32) * np.float32((0.1 / 1.9) ** 0.5)
    return master, update + np.float32(0.1) * master


def rate_for(density: float, spreads: Sequence[float] = SPREADS) -> float:
    """The learning rate at which this share, to some hundredths of it, of tensors with these spreads changes."""
    tensors = [_drawn(np.random.default_rng(0), _SAMPLE, spread) for spread in spreads]
    old = [to_bf16(master) for master, _ in tensors]
    low, high = 1e-9, 1.0
    for _ in range(16):
        middle = (low * high) ** 0.5
        new = (to_bf16(master - np.float32(middle) * update) for master, update in tensors)
        changed = np.mean([np.mean(base != moved) for base, moved in zip(old, new, strict=True)])
        low, high = (middle, high) if changed < density else (low, middle)
    return high
