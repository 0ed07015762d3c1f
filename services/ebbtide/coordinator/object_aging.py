"""Keeps the pauses of Python's garbage collector short, however many workers and rollouts there are.

A full collection walks all objects: that takes 0.4 s with a thousand workers and 100,000 rollouts. So objects that have
survived for a while are set aside (`gc.freeze`). They are freed as soon as nothing refers to them, as all objects are.
Only cycles of them are not: those wait for the walk over everything. It comes every few hours, and when there are twice
as many objects as after the last one. So cycles at most double what is set aside.
"""

import asyncio
import gc
import time
from typing import Final

#: How often survivors are set aside: a busy coordinator makes some ten thousand objects meanwhile.
_EVERY_S: Final = 0.25
#: How often all objects are walked. A worker that leaves may leave some kilobytes in cycles.
_ALL_S: Final = 6 * 3600.0
#: With fewer objects than this, growth is no reason to walk them. To walk so many takes 0.1 s.
_FEW: Final = 1_000_000
#: New objects after which the youngest are collected, and such collections after which those of the second generation
#: are: a pause of some milliseconds. The oldest are left to this module.
_YOUNG: Final = (700, 5, 1 << 30)


class FrozenGrowth:
    """Tells when the objects that are set aside have doubled since the last walk.

    To count them takes 15 ms per million. So they are counted only after so many were added that they may have doubled.
    """

    def __init__(self, few: int = _FEW) -> None:
        self._few = few
        self.walked()

    def walked(self) -> None:
        """Note that all objects were walked just now."""
        count = gc.get_freeze_count()
        self._most = max(self._few, 2 * count)
        self._room = self._most - count

    def doubled(self, added: int) -> bool:
        """Whether there are twice as many, now that `added` were set aside."""
        self._room -= added
        if self._room > 0:
            return False
        count = gc.get_freeze_count()
        self._room = max(self._most - count, self._few // 4)  # near the bound they are not counted each time
        return count >= self._most


async def age_objects(growth: FrozenGrowth | None = None) -> None:
    """Collect garbage and set its survivors aside, for ever."""
    gc.set_threshold(*_YOUNG)
    set_aside()
    growth, walked = growth or FrozenGrowth(), time.monotonic()
    growth.walked()
    while True:
        await asyncio.sleep(_EVERY_S)
        grown = gc.get_count()[2] > 0 and growth.doubled(set_aside())
        if grown or time.monotonic() - walked >= _ALL_S:
            walk_all()
            growth.walked()
            walked = time.monotonic()


def set_aside() -> int:
    """Free cycles among the objects that are not set aside yet, and set the others aside. Returns their number."""
    gc.collect()
    added = len(gc.get_objects())
    gc.freeze()
    return added


def walk_all() -> None:
    """Free cycles among all objects."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
