"""Changes of every kind that training may make, and some that it does not."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[str, Array, Array]

#: Lengths around the strides of the kernels, and less than any of them.
LENGTHS = (1, 2, 63, 64, 65, 1023, 1024, 1025, 4097, 20_000)


def units(width: int, length: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 8 * width, length, dtype=f"u{width}")


def changed(base: Array, density: float, seed: int = 0, most: int = 3) -> Array:
    """`base` after small steps either way at random positions, about `density` of them."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, most + 1, len(base)) * rng.choice([-1, 1], len(base))
    new: Array = base + np.where(rng.random(len(base)) < density, steps, 0).astype(base.dtype)
    return new


def pairs(width: int) -> Iterator[Pair]:
    """Named (base, new): flat unsigned units of one length."""
    top = (1 << 8 * width) - 1
    for length in LENGTHS:
        base = units(width, length)
        for density in (0.0, 0.001, 0.03, 0.3, 1.0):
            yield f"{density} of {length} by a step", base, changed(base, density)
            chosen = np.random.default_rng(1).random(length) < density
            yield f"{density} of {length} by anything", base, np.where(chosen, units(width, length, 2), base)
        for name, place in (("first", 0), ("last", -1)):
            for step in (1, top, top // 2, top // 2 + 1):
                new = base.copy()
                new[place] += np.array(step, base.dtype)
                yield f"the {name} of {length} by {step}", base, new
        yield f"all {length} to zero", base, np.zeros_like(base)
        yield f"all {length} from zero", np.zeros_like(base), base
        yield f"the signs of all {length}", base, base ^ np.array(1 << 8 * width - 1, base.dtype)
        yield f"a low bit of all {length}", base, base ^ np.array(4, base.dtype)


def specials() -> Iterator[Pair]:
    """Bit patterns that float arithmetic would not keep: infinities, NaNs with payloads, -0.0, subnormals."""
    patterns = {
        1: (0x00, 0x80, 0x7F, 0xFF, 0x78, 0xF8, 0x7C, 0x01),
        2: (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C00, 0x0001),
        4: (0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7FA00000, 1),
    }
    for width, found in patterns.items():
        every = np.array(found, f"u{width}")
        yield f"specials of {width}", np.repeat(every, len(every)), np.tile(every, len(every))
