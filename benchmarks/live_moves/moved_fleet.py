"""Real vLLM workers, on a core each, under a coordinator whose moves are switched: one that stays, and one that joins.

Invariant: at most two workers are attached, `FIRST` and `second`, and each second one has a name of its own, so that
nothing is known of its speed when it joins.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
from safetensors.numpy import load_file

from benchmarks.live_moves.switched_coordinator import OFF, ON, SWITCH_FILE
from benchmarks.real_kills.checkpoint import make_checkpoint
from benchmarks.real_time import measure
from ebbtide.client import Client, Lease
from ebbtide.errors import InvalidRequest
from ebbtide.local_cluster.launcher import ProgramProcess
from tests.chaos.cluster import Cluster
from tests.engine_config import engine_config
from tests.fakes.links import Way
from tests.support.waiting import wait_until

VOCABULARY: Final = 128
CONTEXT: Final = 4096
SLOTS: Final = 64
#: Of the network: wide, so that throughput is flat from about half of the slots on, and so slow that a block takes
#: several times as long as a rollout stays at its worker before it may move.
HIDDEN: Final = 8192
LAYERS: Final = 3
RUN: Final = "moved"
FIRST: Final = "w1"
_BOOT_S: Final = 400.0
#: Blocks of a pair make the same tokens: what one left in the prefix cache would make moves in the next one cheap.
_ENGINE_ARGS: Final = '{"enable_prefix_caching": false}'


class Joining(NamedTuple):
    """A second worker's way to the coordinator, and its start, which ends once it is attached."""

    way: Way
    starting: asyncio.Task[ProgramProcess]


class MovedFleet:
    """Made by `running`."""

    def __init__(self, cluster: Cluster, client: Client, flags: dict[str, Any], switch: Path) -> None:
        self.cluster, self.client = cluster, client
        self.lease: Lease
        self.second = ""
        self._flags, self._switch = flags, switch
        self._cores = sorted(os.sched_getaffinity(0))
        self._joined = 1
        self._joining: Joining | None = None
        if len(self._cores) < 2:
            raise InvalidRequest("two engines need two cores; run them on a larger machine", field="cores")

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster) -> AsyncIterator["MovedFleet"]:
        """With the first worker, and the weights."""
        switch, model = cluster.directory / "switch", cluster.directory / "model"
        switch.write_text(OFF)
        config = cluster.directory / "worker.toml"
        config.write_text(engine_config(CONTEXT, kv_cache_mib=512, engine_args=_ENGINE_ARGS))
        await asyncio.to_thread(
            make_checkpoint, model, 1, vocab_size=VOCABULARY, hidden_size=HIDDEN, layers=LAYERS, positions=CONTEXT
        )
        flags = {"engine": "vllm", "model": model, "config": config, "slots": SLOTS, "boot_s": _BOOT_S}
        windows = {"flush_tokens": 32, "flush_interval_ms": 250}
        fleet = cls(cluster, await _boot(cluster, switch), flags | windows, switch)
        await cluster.worker(FIRST, **fleet._flags)
        fleet._bind(FIRST, fleet._cores[0])
        spec = {"name": RUN, "model": str(model), "environment": {"name": "none"}}
        await fleet.client.submit(spec, RUN)
        async with fleet.client.claim(RUN) as lease:
            fleet.lease = lease
            await lease.publish(load_file(model / "model.safetensors"), step=0)
            await fleet._serving(FIRST)
            try:
                yield fleet
            finally:
                if fleet._joining is not None:
                    fleet._joining.starting.cancel()
                    await fleet._joining.way.close()

    def switch_moves(self, *, on: bool) -> None:
        self._switch.write_text(ON if on else OFF)

    async def prepare(self) -> None:
        """Boot a second worker whose way to the coordinator is silent: its engine is ready, and it is not attached."""
        self._joined += 1
        self.second = name = f"w{self._joined}"
        way = await Way.open(self.cluster.process["coordinator"].address)
        way.hold()
        starting = asyncio.create_task(self.cluster.worker(name, coordinator=way.address, **self._flags))
        self._joining = Joining(way, starting)
        await wait_until(lambda: way.forth.silent or starting.done(), _BOOT_S, what=f"the engine of {name}")
        if starting.done():
            await starting  # it has failed
        self._bind(name, self._cores[1])

    async def join(self) -> None:
        """Let the prepared worker attach; returns once it has the weights."""
        if self._joining is not None:
            self._joining.way.release()
            await self._joining.starting
        await self._serving(self.second)

    async def leave(self) -> None:
        """Have the second worker drain, and end."""
        await self.client.drain_worker(self.second)
        process = self.cluster.process[self.second]
        await wait_until(lambda: not process.running(), timeout=60, what=f"the end of {self.second}")
        if self._joining is not None:
            await self._joining.way.close()
        self._joining = None

    async def _serving(self, name: str) -> None:
        async def found() -> bool:
            return any(one.worker_id == name and one.installed for one in await self.client.workers())

        await wait_until(found, timeout=60, interval=0.05, what=f"weights at {name}")

    def _bind(self, name: str, core: int) -> None:
        """Bind a worker and its engine, with all their threads, to a core. The engine is below all else in a real-time
        class, as a program that computes is in the usual one: what wakes for a moment need not wait for its turn.
        """
        worker = psutil.Process(self.cluster.pid(name))
        engine = worker.children(recursive=True)
        for one in (worker, *engine):
            for task in Path(f"/proc/{one.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
                if one is not worker:
                    measure(int(task.name))


async def _boot(cluster: Cluster, switch: Path) -> Client:
    """Start Redis, the coordinator and a relay."""
    await asyncio.to_thread(cluster.store)
    cluster.environment["coordinator"] = {SWITCH_FILE: str(switch)}
    module = "benchmarks.live_moves.switched_coordinator"
    flags: dict[str, Any] = {"server_listen": "127.0.0.1:0", "store_url": cluster.redis.url}
    await cluster.start("coordinator", module, boot_s=_BOOT_S, **flags)
    await cluster.relay()
    return cluster.client()
