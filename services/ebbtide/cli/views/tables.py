"""Builds the tables that commands print, and formats amounts, durations and foreign text for them."""

import asyncio
import datetime as dt
import json
import math
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbtide.cli.waiting import Waiting
from ebbtide.types.fleet import WorkerState
from ebbtide.types.session import KeyUsage

#: Workers that are not attached: what they reported last is out of date, and `running` counts what they left.
GONE: Final = (WorkerState.LOST, WorkerState.SUSPECTED)
_WIDE: Final = 1000
_RIGHT: Final = frozenset({"slots", "tokens/s", "tokens", "weight", "share", "step", "version", "trained", "age"})


def usage_table(usage: Sequence[KeyUsage]) -> Table:
    columns = ("requests", "open", "tokens", "today", "reserved")
    table = data_table(("key", *columns), left={"key"})
    for one in usage:
        numbers = (one.requests, one.requests_open, one.tokens, one.tokens_today, one.tokens_reserved)
        table.add_row(*map(cell, (one.owner, *(f"{number:,}" for number in numbers))))
    return table


def print_wide(shown: RenderableType, style: str = "") -> None:
    """Prints tables; where another program reads them, a line is a row."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(shown, style=style)


def print_table(table: Table) -> None:
    if table.row_count:
        print_wide(table)
    else:
        print_wide("none", style="dim")


def to_json(records: Any) -> str:
    """Records as JSON: enums are their names, bytes hexadecimal, and numbers that JSON cannot express null."""
    return json.dumps(_builtins(records), default=_text, indent=2)


def _text(value: bytes | dt.datetime) -> str:
    return value.hex() if isinstance(value, bytes) else value.isoformat()


def _builtins(value: Any) -> Any:
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {name: _builtins(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_builtins(one) for one in value]
    if isinstance(value, IntEnum):
        return value.name.lower()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def data_table(
    columns: Sequence[str],
    *,
    left: Container[str],
    wraps: Container[str] = (),
    overflow: Literal["fold", "ellipsis"] = "ellipsis",
) -> Table:
    """An empty table: columns in `left` align left, the others right; those in `wraps` may take several lines."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in left else "right"
        table.add_column(column, justify=justify, no_wrap=column not in wraps, overflow=overflow)
    return table


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A row for each fact: its dim name, and its text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, text in facts:
        table.add_row(cell(name), cell(text))
    return table


def plain(text: str) -> str:
    """The text without control characters, which a terminal would obey: messages come from anywhere."""
    return "".join(one if one.isprintable() else " " for one in text)


def cell(text: str) -> Text:
    """A table's cell that shows the text unchanged; rich reads plain strings for markup, such as `[/path]`."""
    return Text(plain(text))


def clock(seconds: float) -> str:
    """Formats a duration as minutes and seconds, with hours, or as days and hours."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def amount(size: float) -> str:
    """Formats bytes to three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def plain_table(*columns: str) -> Table:
    return data_table(columns, left=set(columns) - _RIGHT, wraps={*_RIGHT, ""})


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
