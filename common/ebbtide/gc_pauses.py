"""Keeps the pauses of Python's garbage collector short, however many objects a service has.

A full collection walks all objects: that takes 0.7 s in a coordinator of a thousand workers and 100,000 rollouts, and
0.4 s in a gateway that has loaded vLLM's parsers, without a single stream. No message is taken in meanwhile. So there
is none while such a service runs. What has survived for a while is set aside (`gc.freeze`), and freed as soon as
nothing refers to it, as all objects are. Cycles would stay for ever: what is over lets go of what refers to it, which
`tests/integration/coordinator/test_heap.py` and `tests/unit/gateway/http/test_heap.py` show.
"""

import asyncio
import gc
import time
from typing import Final

#: How often objects that are not set aside are counted. Python counts what is made less what is freed: where each new
#: object takes an old one's place, as the state of thousands of streams does, it collects the young too late.
_LOOK_S: Final = 0.05
#: More of them are set aside at once, and fewer after so many seconds.
_MANY: Final = 4_000
_EVERY_S: Final = 0.25
#: New objects after which the youngest are collected, and such collections after which those of the second generation
#: are: a pause of some milliseconds. The oldest are left to this module.
_YOUNG: Final = (700, 5, 1 << 30)
#: In a burst, as where a thousand completions begin at once, Python itself collects the second generation at least so
#: often before survivors are set aside. Then they are not counted, and only the youngest are walked again, as where
#: there are more objects than these.
_BURST: Final = 4
_WALKED: Final = 15_000


async def age_objects() -> None:
    """Collect young garbage and set its survivors aside, for ever."""
    gc.set_threshold(*_YOUNG)
    gc.collect()  # cycles that imports left
    gc.freeze()
    last = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_S)
        found = _young()
        if found > _MANY or (gc.get_count()[2] and time.monotonic() - last > _EVERY_S):
            set_aside(found)
            last = time.monotonic()


def set_aside(young: int | None = None) -> None:
    """Set aside all objects that are not yet. First free cycles among them, or among the youngest if they are too many.
    `young`: how many there are, if that is known.
    """
    gc.collect(2 if (_young() if young is None else young) <= _WALKED else 0)
    gc.freeze()


def _young() -> int:
    """Objects that are not set aside; in a burst more than are walked, without counting them."""
    return _WALKED + 1 if gc.get_count()[2] >= _BURST else len(gc.get_objects())
