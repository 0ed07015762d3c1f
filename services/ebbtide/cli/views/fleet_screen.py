"""Shows all workers on one live screen, or as plain lines where the output is no terminal.

Invariant: the screen only reads what the coordinator lists, and stores nothing.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ebbtide.cli.cluster_connection import coordinator_of
from ebbtide.cli.views.run_progress import standing
from ebbtide.cli.views.tables import GONE, cell, data_table, plain
from ebbtide.cli.views.watch_loop import watch
from ebbtide.types.fleet import Worker, WorkerState

if TYPE_CHECKING:
    from ebbtide.client import Client

_STYLES: Final = {
    WorkerState.LOST: "red",
    WorkerState.SUSPECTED: "red",
    WorkerState.SHUNNED: "yellow",
    WorkerState.DRAINING: "yellow",
}
_RIGHT: Final = ("load", "plateau", "tok/s", "version", "heard", "tokens")
_WORDS: Final = {WorkerState.INSTALLING: "installs new weights", WorkerState.DRAINING: "hands over"}


def fleet_table(workers: Sequence[Worker]) -> Table:
    """Tabulates all that is known of each worker.

    `load`: its rollouts / those without a token yet / the slots that it offers. `plateau`: rollouts at which its
    throughput flattens. `tok/s`: of all rollouts / of each one with one more, as learnt.
    `heard`: seconds since its last heartbeat. `lent`, if some are borrowed: the share of time that the host lends, and
    for how many seconds it goes on lending (+) or not lending (-). `memory`, once it was short somewhere: rollouts that
    wait for the engine's memory / times that one gave it up for others / times that the engine took it by itself.
    """
    lent = any(worker.borrowed is not None for worker in workers)
    memory = any(map(_memory, workers))
    left = ("worker", "kind", "is doing")
    columns = (*left, *_RIGHT, *(["memory"] if memory else []), *(["lent"] if lent else []))
    table = data_table(columns, left=left, wraps={"is doing"}, overflow="fold")
    for worker in workers:
        numbers = _numbers(worker)
        if worker.state in GONE:
            numbers = ("",) * (len(_RIGHT) - 1) + numbers[-1:]
        style = "dim" if _went(worker) else "yellow" if worker.given_up else _STYLES.get(worker.state, "")
        cells = (worker.worker_id, worker.kind.name.lower(), state(worker), *numbers)
        cells += (_memory(worker),) if memory else ()
        cells += (_lent(worker),) if lent else ()
        table.add_row(*map(cell, cells), style=style)
    return table


def state(worker: Worker) -> str:
    """Says what the worker is doing, with its reason if it gives one."""
    match worker.state:
        case WorkerState.READY | WorkerState.INSTALLING if why := standing(worker):
            words = why
        case WorkerState.READY:
            words = "generates" if worker.running else "waits for work"
        case WorkerState.SHUNNED:
            words = f"gets no work for {worker.shunned_s:.0f} s"
        case WorkerState.LOST | WorkerState.SUSPECTED if worker.running:
            words = f"{worker.state.name.lower()} with {worker.running} rollouts"
        case WorkerState.LOST:
            words = "gone"
        case other:
            words = _WORDS.get(other, other.name.lower())
    return f"{words}: {worker.reason}" if worker.reason else words


def _went(worker: Worker) -> bool:
    """Whether the worker is lost and left no rollouts."""
    return worker.state is WorkerState.LOST and not worker.running


def _numbers(worker: Worker) -> tuple[str, ...]:
    version = max((installed.version for installed in worker.installed), default=0)
    pace = f"/{worker.rollout_tokens_per_s:,.0f}" if worker.rollout_tokens_per_s else ""
    return (
        f"{worker.running}/{worker.waiting}/{worker.offered_slots or worker.slots}",
        f"{worker.plateau or '-'}",
        f"{worker.tokens_per_s:,.0f}{pace}",
        f"{version or '-'}",
        f"{worker.last_heartbeat_s:.1f} s",
        f"{worker.tokens_generated:,}",
    )


def _memory(worker: Worker) -> str:
    counts = (worker.unadmitted, worker.parked, worker.preemptions)
    return "/".join(map(str, counts)) if any(counts) else ""


def _lent(worker: Worker) -> str:
    if worker.borrowed is None or worker.state in GONE:
        return ""
    return f"{worker.borrowed.share:.0%} {'+' if worker.borrowed.granted else '-'}{worker.borrowed.spell_s:.0f} s"


def fleet_line(workers: Sequence[Worker]) -> str:
    """Sums up the fleet in a line."""
    there = [worker for worker in workers if worker.state not in GONE]
    running, slots = sum(worker.running for worker in there), sum(worker.slots for worker in there)
    speed = sum(worker.tokens_per_s for worker in there)
    gone = len(workers) - len(there)
    lately = f", {gone} gone lately" if gone else ""
    return f"{len(there)} workers{lately} · {running}/{slots} rollouts · {speed:,.0f} tokens/s"


def worker_line(worker: Worker) -> str:
    """Describes one worker in a line, for output that is no terminal."""
    told = plain(f"{worker.worker_id} {state(worker)}")
    if worker.state in GONE:
        return told
    numbers = dict(zip(_RIGHT, _numbers(worker), strict=True))
    if memory := _memory(worker):
        numbers["memory"] = memory
    if worker.borrowed is not None:
        numbers["lent"] = _lent(worker)
    return "; ".join((told, *(f"{name} {value}" for name, value in numbers.items())))


def fleet_picture(workers: Sequence[Worker]) -> Group:
    return Group(Text(fleet_line(workers), style="bold"), Text(), fleet_table(workers))


async def watch_fleet(client: "Client", every_s: float, console: Console | None = None) -> None:
    """Shows the fleet until cancelled. Raises `Unavailable` if the coordinator stays unreachable."""

    def shown(workers: Sequence[Worker]) -> Iterable[str]:
        return map(worker_line, workers)

    await watch(coordinator_of(client), client.workers, fleet_picture, shown, every_s, console)
