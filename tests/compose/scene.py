"""What happens to the containers while a run goes on, and what has to be true of it in the end.

The run is submitted from outside: through the SDK, on the ports that the compose file publishes on the loopback.
"""

import asyncio
import os
import signal
import tomllib
from collections.abc import Callable
from typing import Any, Final

from ebbtide.cli.views.run_progress import RunProgress, follow
from ebbtide.client import Client
from ebbtide.testing.wait import wait_until
from ebbtide.types.fleet import WorkerState
from ebbtide.types.run import Run, RunStatus
from tests.compose.clients import SPEC, GatewayClients
from tests.compose.podman import Failed, Podman

STAYING: Final = ("redis", "coordinator", "weight-relay", "gateway", "trainer", "driver", "worker")
#: Of docker-compose.yml: the slots of a worker, and the tokens of each that it may hold unstored.
SLOTS, FLUSH_TOKENS = 64, 8
_LOOK_S: Final = 0.1
#: A worker's engine boots in some 15 s alone; beside much else that has been minutes.
_BOOT_S: Final = 600.0
_RUN_S: Final = 900.0


async def workers_attached(client: Client, wanted: int) -> None:
    """Raises `TimeoutError` if so many workers are not ready in time."""

    async def ready() -> bool:
        return sum(worker.state is WorkerState.READY for worker in await client.workers()) == wanted

    await wait_until(ready, _BOOT_S, interval=_LOOK_S, what=f"{wanted} workers attached")


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
            if any(binding["HostIp"] != "127.0.0.1" for binding in bindings or []):  # None: exposed, and not published
                raise Failed(f"{service} publishes {port} off the loopback: {bindings}")


async def run_and_break(
    podman: Podman, client: Client, clients: GatewayClients, steps: int, tell: Callable[[str], None]
) -> Run:
    """Submit a run, kill the worker's container in the middle of its responses and the coordinator's process, and wait
    for the end. Meanwhile a person and an agent ask its policy. Raises `Failed`."""
    spec: dict[str, Any] = tomllib.loads(SPEC.read_text())
    spec["trainer"]["steps"] = steps
    run = await client.submit(spec)
    tell(f"submitted {run.run_id}, {steps} steps")
    progress = RunProgress(run.run_id, run=run)
    following = asyncio.create_task(follow(client, progress))
    try:
        async with asyncio.timeout(_RUN_S):
            await _break(podman, client, progress, following, clients, tell)
            return await following
    except TimeoutError as error:
        raise Failed(f"{error or f'the run did not end within {_RUN_S:g} s'}: {progress.run}") from None
    finally:
        following.cancel()
        await asyncio.wait({following})


async def _break(
    podman: Podman,
    client: Client,
    progress: RunProgress,
    following: asyncio.Task[Run],
    clients: GatewayClients,
    tell: Callable[[str], None],
) -> None:
    def first_step() -> bool:
        return bool(progress.steps) or following.done()

    await wait_until(first_step, _RUN_S, interval=_LOOK_S, what="the first step")
    await _ask(clients, progress.run_id, tell)
    name = podman.container("worker")
    await _stop_midway(client, progress.run_id, podman.inspect(name)["State"]["Pid"], following)
    podman("kill", "--signal", "KILL", name)
    tell(f"killed the worker's container while it generated, {len(progress.steps)} steps done")
    podman("wait", name)
    podman.compose("up", "--detach", "--no-build", "worker", timeout_s=300)
    tell("brought it back with `up`")
    reached = len(progress.steps)

    def further() -> bool:
        return len(progress.steps) > reached or following.done()

    await wait_until(further, _BOOT_S, interval=_LOOK_S, what="a step with the new worker")
    await crash(podman, "coordinator")
    tell("killed the coordinator's process; its restart policy brought it back")


async def _stop_midway(client: Client, run_id: str, pid: int, following: asyncio.Task[Run]) -> None:
    """Freeze the worker's process in the middle of its responses: podman needs seconds to kill it on a busy machine."""
    full_at: int | None = None

    async def holds() -> int:
        """Rollouts of the only worker, as the coordinator has them."""
        return sum(worker.running for worker in await client.workers())

    async def generates() -> bool:
        """Whether tokens were stored since the worker has been given much."""
        nonlocal full_at
        if following.done():
            raise Failed("the run ended before anything was killed")
        stored = (await client.run(run_id)).counters.get("tokens_stored", 0)
        if await holds() <= SLOTS // 2:
            full_at = None
        elif full_at is None:
            full_at = stored
        return full_at is not None and stored > full_at + SLOTS

    while True:
        await wait_until(generates, _RUN_S, interval=_LOOK_S, what="a worker in the middle of responses")
        os.kill(pid, signal.SIGSTOP)
        if await holds() > SLOTS // 2:
            return
        os.kill(pid, signal.SIGCONT)


async def _ask(clients: GatewayClients, run_id: str, tell: Callable[[str], None]) -> None:
    tell(f"`ebbtide chat` printed {await clients.chat(run_id)!r}")
    tell(f"an agent was answered under version {await clients.ask(run_id)}")
    await clients.check_strangers(run_id)


async def crash(podman: Podman, service: str) -> None:
    """Kill the process alone, as a fault of its own would: then the restart policy has to bring it back."""
    name = podman.container(service)
    before = podman.inspect(name)["State"]["Pid"]
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        return podman.inspect(name)["State"]["Pid"] not in {0, before}

    await wait_until(back, 60, interval=_LOOK_S, what=f"a new {service}")


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
