"""Retries calls with growing, jittered pauses."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ebbtide.errors import EbbtideError, NoCapacity, Unavailable

T = TypeVar("T")


def pauses(first_s: float = 0.05, cap_s: float = 2.0) -> Iterator[float]:
    """Seconds before each further try: they double up to `cap_s`; each is drawn from the upper half (jitter)."""
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
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Repeat `await call()` while it raises one of `on`, for `patience_s` seconds; then raise the last error.

    `NoCapacity` among `on` sets the least pause itself. `pause` waits at most the given seconds. Use it only for calls
    that are safe to repeat.
    """
    give_up = time.monotonic() + patience_s
    for wait in pauses(first_s, cap_s):
        try:
            return await call()
        except on as error:
            if isinstance(error, NoCapacity):
                wait = max(wait, error.retry_after_s)  # noqa: PLW2901 - for this round only
            if time.monotonic() + wait > give_up:
                raise
        await pause(wait)
    raise AssertionError("pauses do not end")
