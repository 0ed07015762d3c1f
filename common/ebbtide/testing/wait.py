"""Waiting for a condition, instead of sleeping and hoping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def wait_until(
    predicate: Callable[[], T | Awaitable[T]], timeout: float = 10.0, *, interval: float = 0.01, what: str = ""
) -> T:
    """The first truthy value of `predicate()` (plain or async). Raises `TimeoutError` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        result = predicate()
        value: T = await result if inspect.isawaitable(result) else result
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout:g} s: {what or _source(predicate)}; last value {value!r}")
        await asyncio.sleep(interval)


def _source(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except (OSError, TypeError):
        return repr(predicate)
