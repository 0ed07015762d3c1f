"""Waiting for whichever of several things ends first, and the error by which work fails its run."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from ebbtide.errors import EbbtideError


class RunFailed(EbbtideError):
    """The run itself is at fault and cannot go on; the message says why."""


async def race(*works: Awaitable[Any]) -> int:
    """Run all until one ends, then cancel the others and wait for them.

    Returns which one ended, or raises what it raised (the innermost error, where task groups wrapped it).
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    winner = next(number for number, task in enumerate(tasks) if task in done)
    if (error := tasks[winner].exception()) is not None:
        raise _innermost(error)
    return winner


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
