"""Keeps the pauses of Python's garbage collector short, however many workers and rollouts there are.

A full collection walks all objects: that takes 0.4 s with a thousand workers and 100,000 rollouts. So objects that have
survived for a while are set aside (`gc.freeze`). They are freed as soon as nothing refers to them, as all objects are.
Only cycles of them are not: those wait for the walk over everything. It comes every few hours, and when memory has
doubled since the last one. So cycles at most double what is set aside.
"""

import asyncio
import gc
import sys
import time
from typing import Final

#: How often survivors are set aside: a busy coordinator makes some ten thousand objects meanwhile.
_EVERY_S: Final = 0.25
#: How often all objects are walked. A worker that leaves may leave some kilobytes in cycles.
_ALL_S: Final = 6 * 3600.0
#: With fewer blocks of memory than this, growth is no reason for a walk. An object has a block or two.
_FEW: Final = 4_000_000
#: New objects after which the youngest are collected, and such collections after which those of the second generation
#: are: a pause of some milliseconds. The oldest are left to this module.
_YOUNG: Final = (700, 5, 1 << 30)


class HeapGrowth:
    """Tells when the blocks of memory that Python has in use have doubled since the last walk."""

    def __init__(self, few: int = _FEW) -> None:
        self._few = few
        self.walked()

    def walked(self) -> None:
        """Note that all objects were walked just now."""
        self._most = max(self._few, 2 * sys.getallocatedblocks())

    def doubled(self) -> bool:
        return sys.getallocatedblocks() >= self._most


async def age_objects(growth: HeapGrowth | None = None) -> None:
    """Collect garbage and set its survivors aside, for ever."""
    gc.set_threshold(*_YOUNG)
    set_aside()
    growth, walked = growth or HeapGrowth(), time.monotonic()
    while True:
        await asyncio.sleep(_EVERY_S)
        if growth.doubled() or time.monotonic() - walked >= _ALL_S:
            walk_all()
            growth.walked()
            walked = time.monotonic()
        elif gc.get_count()[2]:
            set_aside()


def set_aside() -> None:
    """Free cycles among the objects that are not set aside yet, and set the others aside."""
    gc.collect()
    gc.freeze()


def walk_all() -> None:
    """Free cycles among all objects."""
    gc.unfreeze()
    set_aside()
