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
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """`await call()` until it does not raise one of `on`, for `patience_s` seconds; then the last error is raised.

    `NoCapacity` among `on` is waited for as long as it asks. `pause` waits so many seconds, or less. Only for calls
    that may be repeated.
    """
    give_up = time.monotonic() + patience_s
    for wait in pauses(first_s, cap_s):
        try:
            return await call()
        except on as error:
            if isinstance(error, NoCapacity):
                wait = max(wait, error.retry_after_s)  # noqa: PLW2901 - of this round alone
            if time.monotonic() + wait > give_up:
                raise
        await pause(wait)
    raise AssertionError("pauses do not end")
