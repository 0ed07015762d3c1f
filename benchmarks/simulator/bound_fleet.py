"""A whole cluster on two declared cores: engines on the first, in equal slices of it, everything else on the second.

Workers that are to come later are booted before and frozen, for a boot takes a core from those that are measured. The
coordinator has given them up by then; a frozen one that is thawed attaches like one that has just booted.
Invariant: `present` and `spare` are disjoint, and hold each worker that was started and was not killed or drained.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.simulator.core_slices import CoreSlices, core_slices
from benchmarks.simulator.random_policy import CONTEXT, make_random_policy
from benchmarks.simulator.random_reward import ENVIRONMENT
from ebbtide.client import Client
from ebbtide.errors import InvalidRequest
from ebbtide.local_cluster.launcher import LaunchFailed
from ebbtide.types.fleet import WorkerState
from tests.chaos.cluster import Cluster
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

#: Engines at once, each of which has a turn of the first core.
TURNS: Final = 3
SLOTS: Final = 16
#: The defaults of workers: what a kill may cost each rollout.
FLUSH_TOKENS: Final = 32
FLUSH_INTERVAL_MS: Final = 250
_KV_MIB: Final = 64
#: What fits there: keys and values of the demo's network, 4 layers of 2 heads of 32 float32 numbers.
KV_TOKENS: Final = (_KV_MIB << 20) // (2 * 4 * 2 * 32 * 4)
#: A frozen worker is given up after the coordinator's usual patience.
_HEARTBEAT_TIMEOUT_S: Final = 2.5
#: The coordinator lists a worker that is there in one of these states.
_THERE: Final = (WorkerState.READY, WorkerState.INSTALLING)
_SLEEPING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
_BOOT_S: Final = 240.0
_DRAIN_S: Final = 30.0
_WATCH_S: Final = 0.5
#: Engines that boot at the same time. More than cores only make each other wait.
_BOOTS: Final = 2


def declared_cores() -> tuple[int, int]:
    """The core of the engines, and that of everything else. Raises `InvalidRequest` if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise InvalidRequest("real settings need two cores; run them on a larger machine", field="cores")
    return cores[0], cores[1]


class BoundFleet:
    """Made by `bound_fleet`."""

    def __init__(self, directory: Path, slices: CoreSlices) -> None:
        self.cluster = Cluster(directory)
        self.engine_core, self.other_core = declared_cores()
        self.present: list[str] = []
        self.spare: list[str] = []
        self.boots_s: list[float] = []
        self.model = directory / "policy"
        self._slices = slices
        self._turns: dict[str, int] = {}
        self._leaving: set[str] = set()
        self.started: list[str] = []  # all workers, in order
        self._flags: dict[str, Any] = {}

    async def boot(self, seed: int) -> Client:
        """Starts everything but workers. Returns a client."""
        directory = self.cluster.directory
        make_random_policy(self.model, seed)
        config = directory / "worker.toml"
        config.write_text(engine_config(CONTEXT, kv_cache_mib=_KV_MIB))
        self._flags = {
            "engine": "vllm",
            "model": self.model,
            "config": config,
            "slots": SLOTS,
            "kind": "reserved",
            "flush_tokens": FLUSH_TOKENS,
            "flush_interval_ms": FLUSH_INTERVAL_MS,
            "mirror_dir": directory / "mirrors",
            "boot_s": _BOOT_S,
        }
        client = await self.cluster.boot(workers=0, heartbeat_s=1.0, heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S)
        await self._start_run_programs()
        for name in ("redis", "coordinator", "relay", "trainer", "driver"):
            self.bind(self.cluster.pid(name), self.other_core)
        return client

    async def _start_run_programs(self) -> None:
        """Starts the trainer, with the one thread that its core has, and the driver, which trusts our environment."""
        services = {name: self.cluster.process[name].address for name in ("coordinator", "relay")}
        shared: dict[str, Any] = {**services, "environments_allowed": ENVIRONMENT, "output_roots": "/"}
        self.cluster.environment["trainer"] = _SLEEPING
        await asyncio.gather(
            self.cluster.start("trainer", "trainer", holder="trainer", threads=1, **shared),
            self.cluster.start("driver", "driver", holder="driver", environments_trust=True, **shared),
        )

    @property
    def late_s(self) -> float:
        """By which the engines' turns lasted longer than they should, in all."""
        return self._slices.late_s

    def ledger(self, name: str) -> Path:
        """The worker's own record of the tokens that it generated."""
        return self.cluster.directory / f"{name}.ledger"

    async def arrange(self, client: Client, present: int, spare: int = 0) -> None:
        """Boots, freezes and thaws until so many workers are attached and at least so many more wait frozen."""
        while len(self.present) > present:
            self._freeze(self.present[-1])
        missing = present + spare - len(self.present) - len(self.spare)
        while missing > 0:
            together = min(_BOOTS, missing)
            await asyncio.gather(*(self._boot_worker() for _ in range(together)))
            missing -= together
        while len(self.present) < present:
            await self.thaw(client)
        gone = set(self.spare)
        await self._listed(client, lambda there: there == set(self.present) and not there & gone, "the fleet's workers")

    async def _boot_worker(self) -> None:
        """Boots a worker and freezes it as soon as it is attached."""
        name = await self._started()
        self.cluster.freeze(name)
        self.spare.append(name)

    async def borrow(self, client: Client, grants: Path) -> None:
        """Boots a worker that borrows the whole core by the grants of a guard; no other may be attached."""
        name = await self._started(kind="borrowed", grant_dir=grants)
        self.present.append(name)
        await self._listed(client, lambda there: there == {name}, f"{name} alone")

    async def _started(self, **flags: Any) -> str:
        """Boots a worker and binds it. Returns its name."""
        name = f"w{len(self.started) + 1}"
        self.started.append(name)
        self.cluster.environment[name] = _SLEEPING
        process = await self.cluster.worker(name, **{**self._flags, **flags})
        self.boots_s.append(time.monotonic() - process.started)
        self.bind(process.pid, self.other_core)
        for pid in self.engines(name):
            self.bind(pid, self.engine_core)
        return name

    async def thaw(self, client: Client) -> str:
        """Lets a spare worker attach, and waits until it has. Returns its name."""
        if not self.spare:
            raise LaunchFailed("no spare worker is left: `arrange` more of them")
        name = self.spare[0]
        await self._listed(client, lambda there: name not in there, f"the loss of {name}")
        self.spare.remove(name)
        self.present.append(name)
        self._turns[name] = min(set(range(TURNS)) - set(self._turns.values()))
        self._assign()
        self.cluster.thaw(name)
        await self._listed(client, lambda there: name in there, f"{name} attached")
        return name

    def kill(self, name: str) -> None:
        """Sends SIGKILL to a worker and its engine."""
        self.cluster.kill(name)
        self._gone(name)

    async def drain(self, client: Client, name: str) -> None:
        """Asks a worker to hand over and leave, and waits until its process has ended."""
        self._leaving.add(name)
        await client.drain_worker(name, _DRAIN_S)
        await wait_until(lambda: not self.cluster.process[name].running(), timeout=60, what=f"the end of {name}")
        self._gone(name)

    def _gone(self, name: str) -> None:
        """Notes that a worker is no longer there; its turn is free."""
        self.present.remove(name)
        self._turns.pop(name, None)
        self._assign()

    def _freeze(self, name: str) -> None:
        self._gone(name)
        self.cluster.freeze(name)
        self.spare.append(name)

    def engines(self, name: str) -> tuple[int, ...]:
        """Ids of the processes of a worker's engine."""
        return self.below(self.cluster.pid(name))

    def below(self, pid: int) -> tuple[int, ...]:
        """Ids of all processes that a process started, and of theirs."""
        return tuple(child.pid for child in psutil.Process(pid).children(recursive=True))

    def _assign(self) -> None:
        self._slices.assign({turn: self.engines(name) for name, turn in self._turns.items()})

    def bind(self, pid: int, core: int) -> None:
        """Binds a process and those below it, with all their threads, to a core."""
        for one in (pid, *self.below(pid)):
            for task in Path(f"/proc/{one}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})

    async def _listed(self, client: Client, expected: Any, what: str) -> None:
        """Waits until the workers that the coordinator lists as being there are as expected."""

        async def found() -> bool:
            return bool(expected({one.worker_id for one in await client.workers() if one.state in _THERE}))

        await wait_until(found, timeout=60, interval=0.05, what=what)

    async def watch(self) -> None:
        """Raises `LaunchFailed` as soon as a program has ended that nobody ended. Never returns."""
        while True:
            programs = ("coordinator", "relay", "trainer", "driver", *self.present)
            for process in (self.cluster.process[name] for name in programs if name not in self._leaving):
                if not process.running():
                    raise LaunchFailed(f"{process.name} ended with {process.status}{process.tail()}")
            await asyncio.sleep(_WATCH_S)


@asynccontextmanager
async def bound_fleet(directory: Path, seed: int) -> AsyncIterator[tuple[BoundFleet, Client]]:
    """Gives a booted fleet without workers. All its processes are gone once the block is left."""
    with core_slices(TURNS) as slices:
        fleet = BoundFleet(directory, slices)
        try:
            yield fleet, await fleet.boot(seed)
        finally:
            slices.assign({})
            await fleet.cluster.close()
