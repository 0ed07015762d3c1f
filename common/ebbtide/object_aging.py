"""Keeps the pauses of Python's garbage collector short, however many objects a service has.

A full collection walks all objects: that takes 0.7 s in a coordinator of a thousand workers and 100,000 rollouts, and
0.4 s in a gateway that has loaded vLLM's parsers, without a single stream. No message is taken in meanwhile. So there
is none while such a service runs. What has survived for a while is set aside (`gc.freeze`), and freed as soon as
nothing refers to it, as all objects are. Cycles would stay for ever: what is over lets go of what refers to it, which
`tests/integration/coordinator/test_heap.py` and `tests/unit/gateway/http/test_heap.py` show.
"""

import asyncio
import gc
from typing import Final

#: How often survivors are set aside: a busy service makes some ten thousand objects meanwhile.
_EVERY_S: Final = 0.25
#: New objects after which the youngest are collected, and such collections after which those of the second generation
#: are: a pause of some milliseconds. The oldest are left to this module.
_YOUNG: Final = (700, 5, 1 << 30)
#: Survivors of so many of these are walked once more before they are set aside: some 15,000 objects. Those of a burst,
#: as when a thousand completions begin at once, are set aside as they are.
_WALKED_AGAIN: Final = 4


async def age_objects() -> None:
    """Collect young garbage and set its survivors aside, for ever."""
    gc.set_threshold(*_YOUNG)
    set_aside()
    while True:
        await asyncio.sleep(_EVERY_S)
        if gc.get_count()[2]:
            set_aside()


def set_aside() -> None:
    """Free cycles among the objects that are not set aside yet, or among the youngest after a burst; set the others
    aside.
    """
    gc.collect(2 if gc.get_count()[2] <= _WALKED_AGAIN else 1)
    gc.freeze()
