"""Trying again with growing, jittered pauses."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ebbtide.errors import EbbtideError, NoCapacity, Unavailable

T = TypeVar("T")


def pauses(first_s: float = 0.05, cap_s: float = 2.0) -> Iterator[float]:
    """Seconds to wait before each further try: doubling up to `cap_s`, each drawn from its upper half (jitter)."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(cap_s, pause * 2)


async def retrying(
    call: Callable[[], Awaitable[T]],
    *,
    patience_s: float,
    on: tuple[type[EbbtideError], ...] = (Unavailable,),
    first_s: float = 0.05,
    cap_s: float = 2.0,
) -> T:
    """`await call()` until it does not raise one of `on`, for `patience_s` seconds; then the last error is raised.

    `NoCapacity` among `on` is waited for as long as it asks. Only for calls that may be repeated.
    """
    give_up = time.monotonic() + patience_s
    for pause in pauses(first_s, cap_s):
        try:
            return await call()
        except on as error:
            wait = max(pause, error.retry_after_s) if isinstance(error, NoCapacity) else pause
            if time.monotonic() + wait > give_up:
                raise
        await asyncio.sleep(wait)
    raise AssertionError("pauses do not end")
