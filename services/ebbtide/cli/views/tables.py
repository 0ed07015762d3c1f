"""Builds the tables that commands print, and formats amounts, durations and foreign text for them."""

import datetime as dt
import json
import math
from collections.abc import Callable, Container, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ebbtide.cli.views.run_progress import doing
from ebbtide.types.fleet import Worker, WorkerState
from ebbtide.types.key_usage import KeyUsage
from ebbtide.types.run import Run

#: Workers that are not attached: what they reported last is out of date, and `running` counts what they left.
GONE: Final = (WorkerState.LOST, WorkerState.SUSPECTED)
_WIDE: Final = 1000
_RIGHT: Final = frozenset({"slots", "tokens/s", "tokens", "weight", "share", "step", "version", "trained", "age"})


def run_table(runs: Sequence[Run]) -> Table:
    table = _table("run", "status", "weight", "share", "step", "version", "trained", "dropped", "age", "")
    for run in sorted(runs, key=lambda run: run.age_s):
        trained, submitted = run.counters.get("trained", 0), run.counters.get("submitted", 0)
        step = f"{run.newest.step if run.newest else 0}/{run.spec.trainer.steps}"
        version = str(run.newest.version) if run.newest else "-"
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(run.dropped.items()) if count) or "0"
        share = f"{run.share.lately:.0%}" if run.share else ""
        standing = (run.run_id, run.status.name.lower(), f"{run.spec.share.weight:g}", share)
        cells = (step, version, f"{trained}/{submitted}", dropped, clock(run.age_s), run.message)
        table.add_row(*map(cell, (*standing, *cells)))
    return table


def worker_table(workers: Sequence[Worker], rate: Callable[[Worker], float] = lambda one: one.tokens_per_s) -> Table:
    """Tabulates workers; `rate` gives the tokens per second to show (default: what the worker reported last)."""
    table = _table("worker", "kind", "is doing", "slots", "tokens/s", "tokens")
    for worker in workers:
        lost = worker.state in GONE
        slots, speed = ("", "") if lost else (f"{worker.running}/{worker.slots}", f"{rate(worker):,.0f}")
        numbers = (slots, speed, f"{worker.tokens_generated:,}")
        cells = (worker.worker_id, worker.kind.name.lower(), doing(worker), *numbers)
        table.add_row(*map(cell, cells), style="red" if lost else "")
    return table


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


def _table(*columns: str) -> Table:
    return data_table(columns, left=set(columns) - _RIGHT, wraps={*_RIGHT, ""})
