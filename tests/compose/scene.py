"""What happens to the containers while a run goes on, and what has to be true of it in the end.

The run is submitted from outside: through the SDK, on the ports that the compose file publishes on the loopback.
"""

import asyncio
import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ebbtide.cli.progress import Progress, follow
from ebbtide.client import Client
from ebbtide.types.fleet import WorkerState
from ebbtide.types.run import Run, RunStatus
from tests.compose.podman import Failed, Podman

SPEC: Final = Path("examples/compose.toml")
STAYING: Final = ("redis", "coordinator", "weight-relay", "trainer", "driver", "worker")
#: Of docker-compose.yml: the slots of a worker, and the tokens of each that it may hold unstored.
SLOTS, FLUSH_TOKENS = 64, 8
_LOOK_S: Final = 0.1
#: A worker's engine boots in some 15 s alone; twice is usual beside others, and containers are started one by one.
_BOOT_S: Final = 300.0
_RUN_S: Final = 900.0


async def until(what: str, ready: Callable[[], bool], within_s: float) -> None:
    """Raises `Failed` naming `what` if `ready` does not come true."""
    try:
        async with asyncio.timeout(within_s):
            while not ready():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise Failed(f"{what}: not within {within_s:g} s") from None


async def workers_attached(client: Client, wanted: int) -> None:
    """Raises `Failed` if so many workers are not ready in time."""
    try:
        async with asyncio.timeout(_BOOT_S):
            while sum(worker.state is WorkerState.READY for worker in await client.workers()) != wanted:
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise Failed(f"{wanted} workers were to be attached within {_BOOT_S:g} s") from None


def check_containers(podman: Podman) -> None:
    """Raises `Failed` for a container that is unhealthy, or has more rights than the compose file says."""
    for service in STAYING:
        name = podman.container(service)
        podman("healthcheck", "run", name)
        found = podman.inspect(name)
        rights = found["HostConfig"]
        if found["Config"]["User"] in {"", "0", "root"} or not rights["ReadonlyRootfs"]:
            raise Failed(f"{service} runs as {found['Config']['User'] or 'root'}, or may write to its image")
        if found["EffectiveCaps"]:
            raise Failed(f"{service} has capabilities: {found['EffectiveCaps']}")
        for port, bindings in (rights["PortBindings"] or {}).items():
            if any(binding["HostIp"] != "127.0.0.1" for binding in bindings):
                raise Failed(f"{service} publishes {port} off the loopback: {bindings}")


async def run_and_break(podman: Podman, client: Client, steps: int, tell: Callable[[str], None]) -> Run:
    """Submit a run, kill the worker's container in the midst of its responses and the coordinator's process, and wait
    for the end. Raises `Failed`."""
    spec: dict[str, Any] = tomllib.loads(SPEC.read_text())
    spec["trainer"]["steps"] = steps
    run = await client.submit(spec)
    tell(f"submitted {run.run_id}, {steps} steps")
    progress = Progress(run.run_id, run=run)
    following = asyncio.create_task(follow(client, progress))
    try:
        async with asyncio.timeout(_RUN_S):
            await _break(podman, progress, following, tell)
            return await following
    except TimeoutError:
        raise Failed(f"the run did not end within {_RUN_S:g} s: {progress.run}") from None
    finally:
        following.cancel()
        await asyncio.wait({following})


async def _break(podman: Podman, progress: Progress, following: asyncio.Task[Run], tell: Callable[[str], None]) -> None:
    def stored() -> int:
        return progress.run.counters.get("tokens_stored", 0) if progress.run else 0

    def midway() -> bool:
        if following.done():
            raise Failed("the run ended before anything was killed")
        return bool(progress.steps) and stored() > before and any(w.running > SLOTS // 2 for w in progress.workers)

    await until("the first step", lambda: bool(progress.steps) or following.done(), _RUN_S)
    before = stored()
    await until("a worker in the midst of responses", midway, _RUN_S)
    name = podman.container("worker")
    podman("kill", "--signal", "KILL", name)
    tell(f"killed the worker's container while it generated, {len(progress.steps)} steps done")
    await until("the end of the container", lambda: not podman.inspect(name)["State"]["Running"], 30)
    podman.compose("up", "--detach", "--no-build", "worker", timeout_s=300)
    tell("brought it back with `up`")
    reached = len(progress.steps)
    await until("a step with the new worker", lambda: len(progress.steps) > reached or following.done(), _BOOT_S)
    await _crash(podman, "coordinator", tell)


async def _crash(podman: Podman, service: str, tell: Callable[[str], None]) -> None:
    """Kill the process alone, as a fault of its own would: then the restart policy has to bring it back."""
    name = podman.container(service)
    before = podman.inspect(name)["State"]["Pid"]
    os.kill(before, signal.SIGKILL)
    await until(f"a new {service}", lambda: podman.inspect(name)["State"]["Pid"] not in {0, before}, 60)
    tell(f"killed the {service}'s process; its restart policy brought it back")


def check_books(run: Run) -> str:
    """What the run's counters say, in one line. Raises `Failed` if they do not add up."""
    counts, dropped = run.counters, sum(run.dropped.values())
    if run.status is not RunStatus.FINISHED:
        raise Failed(f"the run ended as {run.status.name}: {run.message}")
    if counts["submitted"] != counts["trained"] + dropped:
        raise Failed(f"submitted {counts['submitted']}, trained {counts['trained']}, dropped {run.dropped}")
    if run.newest is None or run.newest.step != run.spec.trainer.steps:
        raise Failed(f"the newest version is {run.newest}, of {run.spec.trainer.steps} steps")
    lost, resumed = counts.get("tokens_lost_at_most", 0), counts.get("resumed_midway", 0)
    if lost > SLOTS * FLUSH_TOKENS:
        raise Failed(f"{lost} tokens were lost; a worker with {SLOTS} rollouts may lose {FLUSH_TOKENS} of each")
    if not resumed or not counts.get("tokens_resumed", 0):
        raise Failed("nothing was resumed midway: the kill hit nothing")
    return (
        f"{counts['submitted']} rollouts submitted, {counts['trained']} trained, {dropped} dropped; {resumed} resumed "
        f"midway behind {counts['tokens_resumed']} stored tokens, at most {lost} lost"
    )
