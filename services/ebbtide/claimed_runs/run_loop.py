"""Claims runs and works on them, one after another, in a trainer or driver process.

Invariant: the process holds at most one lease, and its work ends before the next claim. If the process dies, the lease
expires, or ends at once when a process of the same holder name claims the run.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from ebbtide.claimed_runs.run_failure import RunFailed
from ebbtide.claimed_runs.settings import WorkSettings
from ebbtide.client import Client, Lease
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, NoCapacity, Unavailable
from ebbtide.runtime import Shutdown, race
from ebbtide.telemetry import bind, get_logger
from ebbtide.types.ids import new_fence
from ebbtide.types.run import RunEvent, RunStatus

log = get_logger(__name__)
Role = Literal["trainer", "driver"]
Work = Callable[[Client, Lease], Awaitable[None]]

#: Pause before the next claim after an unreachable service interrupted a run.
_PAUSE_S: Final = 2.0


async def serve(settings: WorkSettings, shutdown: Shutdown, role: Role, work: Work) -> None:
    """Claims runs and calls `work` for each, until shutdown; with `once` or a run id, until that run is over."""
    client = Client(settings.coordinator, settings.relay, security=settings.security, patience_s=settings.patience_s)
    async with client:
        shutdown.ready(settings.coordinator)
        await race(_runs(client, settings, role, work), shutdown.requested.wait())


async def _runs(client: Client, settings: WorkSettings, role: Role, work: Work) -> None:
    while not (await _one_run(client, settings, role, work) and (settings.once or settings.run_id)):
        pass


async def _one_run(client: Client, settings: WorkSettings, role: Role, work: Work) -> bool:
    """Works on one run under one lease. Returns whether the run is over for this process."""
    try:
        async with client.claim(settings.run_id or None, role, holder=settings.holder) as lease:
            bind(run_id=lease.run_id)
            log.info("claimed a run", role=role)
            await _under(lease, work(client, lease))
    except LeaseSuperseded as error:
        log.info("stepping down", reason=str(error))
        return True
    except (Unavailable, NoCapacity) as error:
        log.warning("interrupted; taking the run up again", reason=str(error))
        await asyncio.sleep(_PAUSE_S)
        return False
    log.info("the run has ended", run_id=lease.run_id)
    return True


async def _under(lease: Lease, work: Awaitable[None]) -> None:
    """Runs `work` until the lease is lost. Fails the run if the run is at fault."""
    try:
        await race(work, lease.lost.wait())
    except (InvalidRequest, RunFailed) as error:
        log.error("the run failed", reason=str(error))  # noqa: TRY400 - the reason says it all
        await lease.finish(RunStatus.FAILED, str(error))
    except (Unavailable, NoCapacity) as error:
        warning = RunEvent(kind="warning", key=new_fence(), message=f"the {lease.role} is interrupted: {error}")
        with contextlib.suppress(EbbtideError, TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await lease.report([warning])
        raise
