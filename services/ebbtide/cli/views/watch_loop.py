"""Shows a changing state: drawn again on a terminal, as plain lines where the output is none.

Invariant: the loop only reads, and stores nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from ebbtide.cli.views.tables import clock
from ebbtide.cli.waiting import Waiting

T = TypeVar("T")


async def watch(
    service: str,
    ask: Callable[[], Awaitable[T]],
    draw: Callable[[T], RenderableType],
    lines: Callable[[T], Iterable[str]],
    every_s: float,
    console: Console | None = None,
) -> None:
    """Shows what `ask` answers every `every_s` seconds until cancelled. Raises what `ask` raises. `service` answers."""
    console = console or Console()
    began = time.monotonic()
    if not console.is_terminal:
        while True:
            for line in lines(await _look(service, ask)):
                print(f"{clock(time.monotonic() - began):>6}  {line}", flush=True)  # noqa: T201 - this is a command
            await asyncio.sleep(every_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(draw(await _look(service, ask)), refresh=True)
            await asyncio.sleep(every_s)


async def _look(service: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Returns the answer. Also ends the loop on a cancellation that the call swallowed, as gRPC may."""
    with Waiting(service):
        answer = await ask()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer
