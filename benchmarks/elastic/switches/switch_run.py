"""Trains a run on real engines, of which one runs on the trainer's device, and kills programs meanwhile.

The trainer streams and has its device back after a fixed window, in the middle of each step. So each step is a planned
cut: what the engine runs goes on at the other one, which has a device of its own.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.elastic.switches.device_watch import DeviceWatch
from ebbtide.client import Client
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, local_cluster
from ebbtide.types.run import AttemptSpan, Run, RunEvent, RunSpec
from tests.engine_config import engine_config
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

RUN: Final = "switches"
#: The default flush window of workers: what a kill may cost each rollout.
FLUSH_TOKENS: Final = 32
FLUSH_INTERVAL_MS: Final = 250
#: On a busy machine a worker may get no time of the processor for seconds, while its engine goes on. It is not given up
#: then: what that costs is no cost of switches or kills.
HEARTBEAT_TIMEOUT_S: Final = 20.0
#: In the middle of a step's generation, once its version was installed, also on idle cores. There an engine's step
#: takes some 3.5 ms, and a response 800 of them.
WINDOW_S: Final = 1.5
GROUPS, SIZE, MAX_TOKENS = 6, 4, 800
_ENVIRONMENT: Final = "tests.integration.trainer.environments_for_tests:make_source"
#: A step takes some 5 s on two cores. One with a kill waits for the next life of what was killed.
_LONGEST_STEP_S: Final = 60.0
#: What is killed, in turn. The worker is that of the trainer's device.
KILLED: Final = ("trainer-guard", "trainer", "worker", "coordinator")


class SwitchPlan(Struct, frozen=True, kw_only=True):
    """Steps to train, and kills in the last of them: one in each `spacing` steps. `window_s`: the trainer's; 0.0: it
    plans its windows.
    """

    steps: int
    kills: int
    spacing: int
    window_s: float = WINDOW_S


class ProgramKill(Struct, frozen=True):
    """A SIGKILL. `at`: wall-clock time; `worker`: its id, if it was a worker."""

    program: str
    at: float
    worker: str = ""


class SwitchedRun(Struct, kw_only=True):
    """What is left of a run for its accounts."""

    run: Run
    events: list[RunEvent]
    spans: list[AttemptSpan]
    kills: list[ProgramKill]
    watch: DeviceWatch
    ledgers: dict[str, Path]
    guard_log: Path
    took_s: float


async def switched_run(directory: Path, plan: SwitchPlan, *, seed: int, tell: Callable[[str], None]) -> SwitchedRun:
    """Trains and kills as planned. Raises `LaunchFailed` if a program cannot be kept up."""
    began = time.monotonic()
    async with _booted(directory, plan.window_s) as (cluster, client, model):
        tell(f"the cluster with two engines is up after {time.monotonic() - began:.0f} s")
        watch = DeviceWatch(cluster.grants, cluster.workers[-1])
        watching = asyncio.create_task(watch.run())
        events = list[RunEvent]()
        try:
            await client.submit(_spec(model, directory / "output", plan.steps), RUN)
            following = asyncio.create_task(_follow(client, events, tell))
            killing = _kill(cluster, watch, events, following, plan, Random(seed), tell)
            killed = await cluster.launcher.during(killing)
            await cluster.launcher.during(_ended(following))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return SwitchedRun(
            run=await client.run(RUN),
            events=events,
            spans=[span async for span in client.timeline(RUN)],
            kills=killed,
            watch=watch,
            ledgers=cluster.ledgers,
            guard_log=cluster.log("trainer-guard"),
            took_s=time.monotonic() - began,
        )


@asynccontextmanager
async def _booted(directory: Path, window_s: float) -> AsyncIterator[tuple[LocalCluster, Client, Path]]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling one small function takes half of an engine's boot
    model, config = _files(directory)
    address, relay = free_address(), free_address()
    shape = ClusterShape(
        model=model,
        workers=1,
        slots=GROUPS * SIZE,
        coordinator=address,
        relay=relay,
        flush_tokens=FLUSH_TOKENS,
        flush_interval_ms=FLUSH_INTERVAL_MS,
        worker_configs=(config,),
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        generate=True,
        window_s=window_s,
        environments=(_ENVIRONMENT,),
    )
    async with local_cluster(directory / "cluster", lambda _: None) as cluster:
        await cluster.boot(shape)
        async with Client(address, relay, token=cluster.token_file.read_text(), patience_s=120.0) as client:
            yield cluster, client, model


def _files(directory: Path) -> tuple[Path, Path]:
    """Write the model and the workers' settings."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "worker.toml"
    config.write_text(engine_config(1024))
    return save_tiny_model(directory / "model", head=32), config


def _spec(model: Path, output: Path, steps: int) -> RunSpec:
    return msgspec.convert(
        {
            "name": RUN,
            "model": str(model),
            "output": str(output),
            "environment": {"name": _ENVIRONMENT},
            "sampling": {"max_tokens": MAX_TOKENS, "ignore_eos": True},
            "batch": {"groups_per_step": GROUPS, "group_size": SIZE},
            "trainer": {"steps": steps, "learning_rate": 1e-4, "checkpoint_every": 2, "streaming": True},
        },
        RunSpec,
    )


async def _follow(client: Client, events: list[RunEvent], tell: Callable[[str], None]) -> None:
    async for event in client.watch(RUN):
        events.append(event)
        if event.kind == "step" and int(event.values["step"]) % 10 == 0:
            tell(f"step {event.values['step']:.0f}: {event.values.get('window_missing_groups', 0):.0f} groups were cut")


async def _ended(following: "asyncio.Task[None]") -> None:
    await following


async def _kill(
    cluster: LocalCluster,
    watch: DeviceWatch,
    events: list[RunEvent],
    following: "asyncio.Task[None]",
    plan: SwitchPlan,
    random: Random,
    tell: Callable[[str], None],
) -> list[ProgramKill]:
    """Kill in turn, each at a random moment of a step. The first steps are left alone."""
    done, first = list[ProgramKill](), max(2, plan.steps - plan.kills * plan.spacing - 2)
    for number in range(plan.kills):
        after = first + number * plan.spacing
        await wait_until(
            lambda: following.done() or _newest(events) >= after,  # noqa: B023
            timeout=_LONGEST_STEP_S * (after - _newest(events) + 1),
            what=f"step {after}",
        )
        if following.done():
            break
        program = KILLED[number % len(KILLED)]
        if program == "worker":
            await _generating(watch, random.randrange(5, 60))
        else:
            await asyncio.sleep(random.uniform(0.0, 2.0 * WINDOW_S))
        name = cluster.workers[-1] if program == "worker" else program
        at = time.time()
        cluster.launcher.crash(name)
        done.append(ProgramKill(program, at, name if program == "worker" else ""))
        tell(f"{program} killed in step {_newest(events) + 1}")
    return done


async def _generating(watch: DeviceWatch, steps: int) -> None:
    """Wait until the engine of the device has made so many steps in one spell or more."""
    pid, before = watch.made()

    def made() -> bool:
        now, count = watch.made()
        return now != pid or count >= before + steps

    await wait_until(made, timeout=120, what="steps of the engine", interval=0.01)


def _newest(events: list[RunEvent]) -> int:
    return max((int(event.values["step"]) for event in events if event.kind == "step"), default=0)
