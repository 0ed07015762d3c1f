"""Tables of runs and workers, for people."""

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebbtide.cli.views.run_progress import doing
from ebbtide.types.fleet import Worker, WorkerState
from ebbtide.types.run import Run

#: Those that are not attached any more: what they said last is not so any more, and `running` is what they left behind.
GONE: Final = (WorkerState.LOST, WorkerState.SUSPECTED)
_WIDE: Final = 1000


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
    """`rate` gives the tokens per second to show; without it, what the worker said last."""
    table = _table("worker", "kind", "is doing", "slots", "tokens/s", "tokens")
    for worker in workers:
        lost = worker.state in GONE
        slots, speed = ("", "") if lost else (f"{worker.running}/{worker.slots}", f"{rate(worker):,.0f}")
        numbers = (slots, speed, f"{worker.tokens_generated:,}")
        cells = (worker.worker_id, worker.kind.name.lower(), doing(worker), *numbers)
        table.add_row(*map(cell, cells), style="red" if lost else "")
    return table


def wide_console() -> Console:
    """One for tables: where another program reads them, a line is a row."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    return console


def print_table(table: Table) -> None:
    console = wide_console()
    if table.row_count:
        console.print(table)
    else:
        console.print("none", style="dim")


def plain(text: str) -> str:
    """The same without what a terminal might obey: reasons and messages come from anywhere."""
    return "".join(one if one.isprintable() else " " for one in text)


def cell(text: str) -> Text:
    """A table's cell that shows the text as it is: a string would be read for markup, such as `[/path]`."""
    return Text(plain(text))


def clock(seconds: float) -> str:
    """Minutes and seconds, or days and hours once they are many."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def amount(size: float) -> str:
    """Bytes, to three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        right = column in {"slots", "tokens/s", "tokens", "weight", "share", "step", "version", "trained", "age"}
        table.add_column(column, justify="right" if right else "left", no_wrap=not right and column != "")
    return table
