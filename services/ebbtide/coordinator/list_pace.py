"""Takes large lists in a few at a time, with pauses, so that other calls find the loop and the store free.

A list within `AT_ONCE` is taken in without a pause.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
#: Entries between two pauses: a few milliseconds' work.
AT_ONCE: Final = 64
#: A pause lasts as long as the work before it, but no longer than this.
_LONGEST_S: Final = 0.05


async def paced(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """The items in pages. Between two pages is a pause as long as the caller's work on the first."""
    for first in range(0, len(items), AT_ONCE):
        began = time.monotonic()
        yield items[first : first + AT_ONCE]
        if first + AT_ONCE < len(items):
            await asyncio.sleep(min(_LONGEST_S, time.monotonic() - began))
