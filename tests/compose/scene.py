"""What happens to the containers while runs go on, and what has to be true of them in the end."""

import asyncio
import os
import signal
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, Final

from ebbtide.cli.views.run import RunProgress, follow
from ebbtide.client import Client
from ebbtide.errors import NotFound
from ebbtide.types.fleet import WorkerState
from ebbtide.types.run import Run, RunStatus
from tests.compose.clients import SPEC, GatewayClients
from tests.compose.podman import Failed, Podman
from tests.compose.wheel import WheelUser
from tests.support.waiting import wait_until

PLAIN: Final = ("redis", "coordinator", "weight-relay", "gateway", "trainer", "driver", "worker-1", "worker-2")
#: Of docker-compose.yml: the slots of a worker, and the tokens of each that it may hold unstored.
SLOTS, FLUSH_TOKENS = 64, 8
_LOOK_S: Final = 0.1
#: A worker's engine boots in some 15 s alone; beside much else that has been minutes.
_BOOT_S: Final = 600.0
_RUN_S: Final = 900.0
Tell = Callable[[str], None]


async def workers_attached(client: Client, wanted: int) -> None:
    """Raises `TimeoutError` if so many workers are not ready in time."""

    async def ready() -> bool:
        return sum(worker.state is WorkerState.READY for worker in await client.workers()) == wanted

    await wait_until(ready, _BOOT_S, interval=_LOOK_S, what=f"{wanted} workers attached")


def check_containers(podman: Podman, services: Sequence[str], *, sharing: Sequence[str] = (), pids: str = "") -> None:
    """Raises `Failed` for a container that is unhealthy, or has more rights than the compose file says. Those of the
    services `sharing` have the process ids of the service `pids`."""
    holder = f"container:{podman.inspect(podman.container(pids))['Id']}" if pids else ""
    for service in services:
        name = podman.container(service)
        podman("healthcheck", "run", name)
        found = podman.inspect(name)
        rights = found["HostConfig"]
        if found["Config"]["User"] in {"", "0", "root"} or not rights["ReadonlyRootfs"]:
            raise Failed(f"{service} runs as {found['Config']['User'] or 'root'}, or may write to its image")
        if found["EffectiveCaps"]:
            raise Failed(f"{service} has capabilities: {found['EffectiveCaps']}")
        if rights["PidMode"] != (holder if service in sharing else "private"):
            raise Failed(f"{service} has the process ids of {rights['PidMode']}")
        for port, bindings in (rights["PortBindings"] or {}).items():
            if any(binding["HostIp"] != "127.0.0.1" for binding in bindings or []):  # None: exposed, and not published
                raise Failed(f"{service} publishes {port} off the loopback: {bindings}")


def command_line(podman: Podman, *words: str, profiles: Sequence[str] = ()) -> str:
    """What `docker compose run --rm cli WORDS` prints. Raises `Failed`."""
    run = ("run", "--rm", "-T", "--no-deps", "cli", *words)
    return podman.compose(*run, profiles=(*profiles, "cli"), timeout_s=_RUN_S)


async def run_and_break(podman: Podman, client: Client, clients: GatewayClients, tell: Tell) -> Run:
    """Submit the example by the command line's container, kill a worker's container in the middle of its responses, and
    then the processes of coordinator and relay, and wait for the end. Meanwhile a person and an agent ask its policy.

    Raises `Failed`.
    """
    words = ("run", "submit", str(SPEC), "--watch", "--run-id", "first")
    watched = asyncio.create_task(asyncio.to_thread(command_line, podman, *words))
    run = await _appears(client, "first", watched)
    progress = RunProgress(run.run_id, run=run)
    following = asyncio.create_task(follow(client, progress))
    try:
        async with asyncio.timeout(_RUN_S):
            await _break(podman, client, progress, following, clients, tell)
            ended = await following
            _learnt(await watched, progress.rewards, tell)
            return ended
    except TimeoutError as error:
        raise Failed(f"{error or f'the run did not end within {_RUN_S:g} s'}: {progress.run}") from None
    finally:
        for task in (following, watched):
            task.cancel()
        await asyncio.wait({following, watched})


async def _appears(client: Client, run_id: str, watched: "asyncio.Task[str]") -> Run:
    found: list[Run] = []

    async def there() -> bool:
        if watched.done():
            watched.result()  # raises what went wrong
        try:
            found.append(await client.run(run_id))
        except NotFound:
            return False
        return True

    await wait_until(there, _BOOT_S, interval=_LOOK_S, what="the submitted run")
    return found[-1]


def _learnt(printed: str, rewards: Sequence[float], tell: Tell) -> None:
    """What the watching command showed of the run to its end. Raises `Failed` if no reward rose."""
    steps = [line.strip() for line in printed.splitlines() if "reward" in line]
    if not steps:
        raise Failed(f"the command showed no step of the run:\n{printed[-2000:]}")
    tell(f"`cli run submit --watch` showed {len(steps)} lines of steps; the first and the last:")
    tell(f"  {steps[0]}")
    tell(f"  {steps[-1]}")
    if not rewards[0] < rewards[-1]:
        raise Failed(f"the run learnt nothing; its rewards: {rewards}")


async def _break(
    podman: Podman,
    client: Client,
    progress: RunProgress,
    following: asyncio.Task[Run],
    clients: GatewayClients,
    tell: Tell,
) -> None:
    def steps_after(count: int) -> Callable[[], bool]:
        return lambda: len(progress.steps) > count or following.done()

    await wait_until(steps_after(0), _RUN_S, interval=_LOOK_S, what="the first step")
    await _ask(clients, progress.run_id, tell)
    name = podman.container("worker-1")
    await _stop_midway(client, progress.run_id, podman.inspect(name), following)
    podman("kill", "--signal", "KILL", name)
    tell(f"killed worker-1's container while it generated, {len(progress.steps)} steps done")
    podman("wait", name)
    await wait_until(steps_after(len(progress.steps)), _BOOT_S, interval=_LOOK_S, what="a step with the other worker")
    podman.up("worker-1")
    tell("brought it back with `up`")
    for service in ("coordinator", "weight-relay"):
        reached = len(progress.steps)
        await crash(podman, service)
        tell(f"killed the process of {service}; its restart policy brought it back")
        await wait_until(steps_after(reached), _BOOT_S, interval=_LOOK_S, what=f"a step behind the kill of {service}")


async def _stop_midway(client: Client, run_id: str, container: dict[str, Any], following: asyncio.Task[Run]) -> None:
    """Freeze a worker's process in the middle of its responses: podman needs seconds to kill it on a busy machine."""
    pid, host = container["State"]["Pid"], container["Config"]["Hostname"]
    full_at: int | None = None

    async def holds() -> int:
        """Rollouts of this worker, as the coordinator has them."""
        return sum(worker.running for worker in await client.workers() if worker.worker_id.startswith(f"{host}-"))

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
        return full_at is not None and stored > full_at + 2 * SLOTS

    while True:
        await wait_until(generates, _RUN_S, interval=_LOOK_S, what="a worker in the middle of responses")
        os.kill(pid, signal.SIGSTOP)
        if await holds() > SLOTS // 2:
            return
        os.kill(pid, signal.SIGCONT)
        full_at = None


async def _ask(clients: GatewayClients, run_id: str, tell: Tell) -> None:
    tell(f"`ebbtide run chat` printed {await clients.chat(run_id)!r}")
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


async def go_on_after_down(podman: Podman, client: Client, user: WheelUser, tell: Tell) -> Run:
    """Submit a run from the wheel, take the cluster down in the middle of it and up again, and wait for its end.

    Raises `Failed`.
    """
    spec = SPEC.read_text().replace("steps = 8", "steps = 4").replace('name = "compose"', 'name = "outside"')
    program = user.watch(spec)
    assert program.stdout is not None
    run_id = ""
    try:
        while line := await asyncio.to_thread(program.stdout.readline):
            run_id, kind, *_ = line.split()
            if kind == "step":
                break
        else:
            raise Failed(f"the program ended before the first step of {run_id}: {user.complained()}")
        podman.compose("down", timeout_s=300)
        if program.poll() is not None:
            raise Failed(f"the program ended before all was down, with status {program.poll()}: {user.complained()}")
        tell(f"took all down, one step of {run_id} done")
        podman.up()
        if (run := await client.run(run_id)).status.ended:
            raise Failed(f"the run had ended before all was down: {run}")
        said = await asyncio.to_thread(program.communicate, timeout=_RUN_S)
    finally:
        program.kill()
        program.wait()
    last = (said[0].splitlines() or [""])[-1]
    if last.split() != [run_id, RunStatus.FINISHED.name]:
        raise Failed(f"the watching program said in the end: {said[0][-2000:]}{user.complained()}")
    tell(f"up again; the program outside, which had gone on waiting, said: {last}")
    return await client.run(run_id)


def cancel_from_wheel(user: WheelUser, other: str, tell: Tell) -> None:
    """Submit a run from the wheel's command, see it beside another, and cancel it. Raises `Failed`."""
    words = ("run", "submit", "run.toml", "--no-check", "--run-id", "unwanted")
    said = [user.command(*words), user.command("run", "cancel", "unwanted"), user.command("run", "list", "--json")]
    if said[0].strip() != "unwanted" or "cancelled" not in said[1] or f'"{other}"' not in said[2]:
        raise Failed(f"the wheel's commands said {said}")
    tell(f"the wheel's command: {said[1].strip()}")


def check_books(run: Run, *, ended: int, resumed: bool = True) -> str:
    """What the run's counters say, in one line. Raises `Failed` if they do not add up. `ended`: how many workers'
    processes ended during the run; each may lose a flush window of all its rollouts.
    """
    counts, dropped = run.counters, sum(run.dropped.values())
    if run.status is not RunStatus.FINISHED:
        raise Failed(f"the run ended as {run.status.name}: {run.message}")
    if counts["submitted"] != counts["trained"] + dropped:
        raise Failed(f"submitted {counts['submitted']}, trained {counts['trained']}, dropped {run.dropped}")
    if run.newest is None or run.newest.step != run.spec.trainer.steps:
        raise Failed(f"the newest version is {run.newest}, of {run.spec.trainer.steps} steps")
    lost = counts.get("tokens_lost_at_most", 0)
    if lost > ended * SLOTS * FLUSH_TOKENS:
        raise Failed(f"{lost} tokens were lost; {ended} workers with {SLOTS} rollouts may lose {FLUSH_TOKENS} of each")
    if resumed and not (counts.get("resumed_midway", 0) and counts.get("tokens_resumed", 0)):
        raise Failed("nothing was resumed midway: the kill hit nothing")
    return (
        f"{counts['submitted']} rollouts submitted, {counts['trained']} trained, {dropped} dropped; "
        f"{counts.get('resumed_midway', 0)} resumed midway behind {counts.get('tokens_resumed', 0)} stored tokens, "
        f"at most {lost} lost"
    )


def shorter(steps: int, name: str) -> dict[str, Any]:
    """The example with fewer steps."""
    spec: dict[str, Any] = tomllib.loads(SPEC.read_text())
    return spec | {"name": name, "trainer": spec["trainer"] | {"steps": steps}}
