"""Runs `ebbtide drain`: asks a worker to leave, and shows its progress."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console

from ebbtide.cli.views.tables import GONE, plain
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError
from ebbtide.types.fleet import Worker, WorkerState

if TYPE_CHECKING:
    from ebbtide.client import Client

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
            "they go on elsewhere after their stored tokens"
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
