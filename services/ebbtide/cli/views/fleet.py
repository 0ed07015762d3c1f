"""Shows the workers of a cluster, and one that drains."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ebbtide.cli.cluster_connection import coordinator_of
from ebbtide.cli.views.tables import GONE, cell, data_table, plain, plain_table, watch
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError
from ebbtide.types.fleet import Worker, WorkerState

if TYPE_CHECKING:
    from ebbtide.client import Client


_STYLES: Final = {
    WorkerState.LOST: "red",
    WorkerState.SUSPECTED: "red",
    WorkerState.QUARANTINED: "yellow",
    WorkerState.DRAINING: "yellow",
}
_RIGHT: Final = ("load", "plateau", "tok/s", "version", "heard", "tokens")
_WORDS: Final = {WorkerState.INSTALLING: "installs new weights", WorkerState.DRAINING: "hands over"}


def fleet_table(workers: Sequence[Worker]) -> Table:
    """Tabulates all that is known of each worker.

    `load`: its rollouts / those without a token yet / the slots that it offers. `plateau`: rollouts at which its
    throughput flattens. `tok/s`: of all rollouts / of each one with one more, as learnt.
    `heard`: seconds since its last heartbeat. `lent`, if some are borrowed: the share of time that the host lends, and
    for how many more seconds it will lend (+) or not lend (-). `memory`, once it was short somewhere: rollouts that
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
        case WorkerState.QUARANTINED:
            words = f"gets no work for {worker.quarantined_s:.0f} s"
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


_LOOK_S: Final = 0.25
#: Time after the deadline for the worker to close its streams and for the coordinator to notice.
_GRACE_S: Final = 10.0


async def drain_worker(client: "Client", worker_id: str, within_s: float, *, wait: bool) -> None:
    """Drains a worker. Raises `NotFound` if it is not attached, and `EbbtideError` if it stays or is lost."""
    before = await _find(client, worker_id) if wait else None
    count = await client.drain_worker(worker_id, within_s)
    if not wait:
        print(f"{worker_id} was asked to leave within {within_s:g} s; {_rollouts(count)} to hand over")  # noqa: T201
        return
    began, most, now = time.monotonic(), count, before
    console = Console(file=sys.stderr)
    told = "the drain"
    with console.status("") as status, Waiting(lambda: told) as waiting:
        while (now := await _find(client, worker_id)) is not None and not _left(before, now):
            passed = time.monotonic() - began
            if passed > within_s + _GRACE_S:
                raise EbbtideError(
                    f"{worker_id} is still there after {passed:.0f} s with {_rollouts(now.running)}: its log says why; "
                    "they go elsewhere when it ends"
                )
            most = max(most, now.running)
            told = f"{worker_id} to hand over {_rollouts(now.running)} within {max(0.0, within_s - passed):.0f} s"
            status.update(told)
            if console.is_terminal:
                waiting.heard()
            await asyncio.sleep(_LOOK_S)
    if now is not None and now.state in GONE:
        _check_end(now)
    taken = time.monotonic() - began
    print(f"{worker_id} has left after {taken:.1f} s; it handed over {_rollouts(most)}")  # noqa: T201 - a command


async def _find(client: "Client", worker_id: str) -> Worker | None:
    return next((worker for worker in await client.workers() if worker.worker_id == worker_id), None)


def _check_end(gone: Worker) -> None:
    """Raises `EbbtideError` unless the worker handed everything over and left by itself."""
    why = plain(gone.reason) or "no reason known"
    if gone.running:
        raise EbbtideError(
            f"{gone.worker_id} was lost before it had handed over {_rollouts(gone.running)} ({why}); "
            "they resume on other workers after their stored tokens"
        )
    if gone.state is WorkerState.SUSPECTED:
        raise EbbtideError(
            f"{gone.worker_id} was given up ({why}) and has not said that it left; it had no rollouts. "
            "It may attach again when it wakes: end its process, or drain it then"
        )


def _left(before: Worker | None, now: Worker) -> bool:
    """Whether the worker is gone, or a newer process has taken its name."""
    replaced = before is not None and now.uptime_s < before.uptime_s
    return now.state in GONE or replaced


def _rollouts(count: int) -> str:
    return f"{count} rollout" + ("" if count == 1 else "s")


def worker_table(workers: Sequence[Worker], rate: Callable[[Worker], float] = lambda one: one.tokens_per_s) -> Table:
    """Tabulates workers; `rate` gives the tokens per second to show (default: what the worker reported last)."""
    table = plain_table("worker", "kind", "is doing", "slots", "tokens/s", "tokens")
    for worker in workers:
        lost = worker.state in GONE
        slots, speed = ("", "") if lost else (f"{worker.running}/{worker.slots}", f"{rate(worker):,.0f}")
        numbers = (slots, speed, f"{worker.tokens_generated:,}")
        cells = (worker.worker_id, worker.kind.name.lower(), doing(worker), *numbers)
        table.add_row(*map(cell, cells), style="red" if lost else "")
    return table


def standing(worker: Worker) -> str:
    """Why a borrowed worker does nothing; "" if it may work, or is not borrowed."""
    if worker.given_up and worker.state in {WorkerState.READY, WorkerState.INSTALLING}:
        return "is given up"
    if worker.borrowed is None or worker.state is not WorkerState.READY:
        return ""
    if worker.borrowed.asleep:
        return "sleeps: its weights are not on the device"
    return "" if worker.borrowed.granted else "paused for its host"


def _drafting(worker: Worker) -> str:
    """What its drafts bring; empty where it makes none."""
    drafting = worker.drafting
    if drafting is None or not drafting.drafts:
        return ""
    return f"; a draft brings {drafting.accepted / drafting.drafts:.1f} tokens"


def doing(worker: Worker) -> str:
    """Says what a worker is doing, in a few words."""
    version = max((installed.version for installed in worker.installed), default=0)
    with_version = f" with version {version}" if version else ""
    match worker.state:
        case WorkerState.READY:
            works = f"generates {worker.running} rollouts" if worker.running else "waits for work"
            return standing(worker) or f"{works}{with_version}{_drafting(worker)}"
        case WorkerState.INSTALLING:
            return "installs new weights"
        case WorkerState.DRAINING:
            return f"hands over {worker.running} rollouts" if worker.running else "drains"
        case WorkerState.QUARANTINED:
            return f"gets no work for {worker.quarantined_s:.0f} s"
        case state:
            return state.name.lower()
