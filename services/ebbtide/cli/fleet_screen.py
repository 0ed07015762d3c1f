"""The fleet on one screen, live; plain lines where the output is no terminal.

Invariant: it only reads what the coordinator lists, and leaves nothing behind.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbtide.cli.progress import doing
from ebbtide.cli.tables import clock
from ebbtide.types.fleet import Worker, WorkerState

if TYPE_CHECKING:
    from ebbtide.client import Client

_STYLES: Final = {
    WorkerState.LOST: "red",
    WorkerState.SUSPECTED: "red",
    WorkerState.SHUNNED: "yellow",
    WorkerState.DRAINING: "yellow",
}
_RIGHT: Final = ("running", "waiting", "slots", "plateau", "tokens/s", "version", "heartbeat", "tokens")


def fleet_table(workers: Sequence[Worker]) -> Table:
    """All that is known of each worker. `waiting` are those of the running that have no token yet; `plateau` is the
    number of rollouts at which its throughput flattens, once that is known."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "kind", "is doing", *_RIGHT, "reason"):
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=column != "reason")
    for worker in workers:
        numbers = _numbers(worker)
        if worker.state is WorkerState.LOST:  # what it said last but its tokens is not so any more
            numbers = ("",) * (len(_RIGHT) - 1) + numbers[-1:]
        words = (worker.worker_id, worker.kind.name.lower(), doing(worker))
        table.add_row(*words, *numbers, worker.reason, style=_STYLES.get(worker.state, ""))
    return table


def _numbers(worker: Worker) -> tuple[str, ...]:
    version = max((installed.version for installed in worker.installed), default=0)
    return (
        f"{worker.running}",
        f"{worker.waiting}",
        f"{worker.slots}",
        f"{worker.plateau or '-'}",
        f"{worker.tokens_per_s:,.0f}",
        f"{version or '-'}",
        f"{worker.last_heartbeat_s:.1f} s",
        f"{worker.tokens_generated:,}",
    )


def fleet_line(workers: Sequence[Worker]) -> str:
    """The whole fleet in a line."""
    there = [worker for worker in workers if worker.state is not WorkerState.LOST]
    running, slots = sum(worker.running for worker in there), sum(worker.slots for worker in there)
    speed = sum(worker.tokens_per_s for worker in there)
    lost = len(workers) - len(there)
    gone = f", {lost} lost lately" if lost else ""
    return f"{len(there)} workers{gone} · {running}/{slots} rollouts · {speed:,.0f} tokens/s"


def worker_line(worker: Worker) -> str:
    """One worker in a line, for output that is no terminal."""
    if worker.state is WorkerState.LOST:
        return f"{worker.worker_id} lost: {worker.reason}" if worker.reason else f"{worker.worker_id} lost"
    told = ", ".join(f"{name} {value}" for name, value in zip(_RIGHT, _numbers(worker), strict=True))
    return f"{worker.worker_id} {doing(worker)}: {told}" + (f" ({worker.reason})" if worker.reason else "")


async def watch_fleet(client: "Client", every_s: float, console: Console | None = None) -> None:
    """Show the fleet until cancelled. Raises `Unavailable` when the coordinator stays away."""
    console = console or Console()
    began = time.monotonic()
    if not console.is_terminal:
        while True:
            for worker in await client.workers():
                print(f"{clock(time.monotonic() - began):>6}  {worker_line(worker)}", flush=True)  # noqa: T201
            await asyncio.sleep(every_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            workers = await client.workers()
            live.update(Group(Text(fleet_line(workers), style="bold"), Text(), fleet_table(workers)), refresh=True)
            await asyncio.sleep(every_s)
