"""Keeps the pauses of Python's garbage collector short, however many workers and rollouts there are.

A full collection walks all objects: that takes 0.4 s with a thousand workers and 100,000 rollouts. So objects that have
survived for a while are set aside (`gc.freeze`). They are freed as soon as nothing refers to them, as all objects are.
Only cycles of them are not: those wait for the walk over everything, every few hours.
"""

import asyncio
import gc
import time
from typing import Final

#: How often survivors are set aside: a busy coordinator makes some ten thousand objects meanwhile.
_EVERY_S: Final = 0.25
#: How often all objects are walked. A worker that leaves may leave some kilobytes in cycles.
_ALL_S: Final = 6 * 3600.0
#: New objects after which the youngest are collected, and such collections after which those of the second generation
#: are: a pause of some milliseconds. The oldest are left to this module.
_YOUNG: Final = (700, 5, 1 << 30)


async def age_objects() -> None:
    """Collect garbage and set its survivors aside, for ever."""
    gc.set_threshold(*_YOUNG)
    set_aside()
    walked = time.monotonic()
    while True:
        await asyncio.sleep(_EVERY_S)
        if time.monotonic() - walked >= _ALL_S:
            walked = time.monotonic()
            walk_all()
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
