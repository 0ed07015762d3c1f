"""What both streams need: reading a call, and coroutines that stand and fall together."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, however it ends; the others are cancelled, and its exception is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def messages(call: Any) -> AsyncIterator[Any]:
    """What a call brings until the peer ends it; a call that is read and iterated over refuses the second."""
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
