"""Waits for conditions, so that tests need no sleeps."""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def wait_until(
    predicate: Callable[[], Coroutine[Any, Any, T]], timeout: float = ..., *, interval: float = ..., what: str = ...
) -> T: ...
@overload
async def wait_until(
    predicate: Callable[[], T], timeout: float = ..., *, interval: float = ..., what: str = ...
) -> T: ...
async def wait_until(
    predicate: Callable[[], Any], timeout: float = 30.0, *, interval: float = 0.01, what: str = ""
) -> Any:
    """The first truthy value of `predicate()` (plain or async). Raises `TimeoutError` after `timeout` seconds.

    The default suits a busy machine; a condition that comes true waits no longer for it.
    """
    end = time.monotonic() + timeout
    while True:
        result = predicate()
        value = await result if inspect.isawaitable(result) else result
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
