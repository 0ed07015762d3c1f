"""Looking at something again and again: drawn anew on a terminal, plain lines where the output is none.

Invariant: it only asks, and leaves nothing behind.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from ebbtide.cli.views.tables import clock

T = TypeVar("T")


async def watch(
    ask: Callable[[], Awaitable[T]],
    draw: Callable[[T], RenderableType],
    lines: Callable[[T], Iterable[str]],
    every_s: float,
    console: Console | None = None,
) -> None:
    """Show what `ask` answers until cancelled. Raises what `ask` raises."""
    console = console or Console()
    began = time.monotonic()
    if not console.is_terminal:
        while True:
            for line in lines(await _look(ask)):
                print(f"{clock(time.monotonic() - began):>6}  {line}", flush=True)  # noqa: T201 - this is a command
            await asyncio.sleep(every_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(draw(await _look(ask)), refresh=True)
            await asyncio.sleep(every_s)


async def _look(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer. A cancellation that the call took for its own end, as gRPC may, ends the watching all the same."""
    answer = await ask()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer
