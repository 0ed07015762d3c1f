"""The programs of the part `streams`: Redis, a coordinator, a measured gateway, workers, and clients that read."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from benchmarks.control_plane.house import ROOT, code_of, order
from benchmarks.control_plane.measures import cpu_s
from benchmarks.gateway.large_model import save_large_model
from benchmarks.gateway.lean_http import Connection
from benchmarks.gateway.stream_plan import REASONING_PARSER, TOOL_PARSER, StreamPlan
from benchmarks.gateway.unary_calls import unary_requests
from benchmarks.scale.loop_probe import ask
from ebbtide.auth.role_tokens import mint
from ebbtide.auth.roles import Role
from tests.chaos.cluster import TOKEN, Cluster
from tests.support.waiting import wait_until

RUN_ID: Final = "talk-1"
_TOKEN_S: Final = 86400.0
#: A gateway with parsers imports vLLM, and shares the cores with all else.
_BOOT_S: Final = 300.0


class StreamTown:
    """Made by `running`."""

    def __init__(
        self,
        gateway: str,
        pids: dict[str, int],
        probe: Path,
        clients: asyncio.subprocess.Process,
        keys: tuple[str, ...],
        other_key: str,
    ) -> None:
        """`gateway`: its address. `pids`: of the programs whose processor time counts."""
        self.gateway, self.keys, self.other_key = gateway, keys, other_key
        self._pids, self._probe, self._clients = pids, probe, clients

    async def clients(self, do: str, **more: Any) -> dict[str, Any]:
        """Give the process of streams an order: see `stream_clients`."""
        return await order(self._clients, do, **more)

    async def loop(self) -> dict[str, Any]:
        """What the gateway's loop did since it was asked last."""
        return await ask(self._probe, "read")

    def cpu(self) -> dict[str, float]:
        """CPU seconds by program."""
        return {name: cpu_s(pid) for name, pid in self._pids.items()}

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster, plan: StreamPlan) -> AsyncIterator["StreamTown"]:
        """Everything is started, the run has a version, and the gateway has answered each kind of unary call."""
        client = await cluster.boot(workers=0, heartbeat_s=2.0, heartbeat_timeout_s=60.0)
        model = await asyncio.to_thread(save_large_model, cluster.directory / "model")
        key = Ed25519PrivateKey.generate()
        names = [*(f"key{number}" for number in range(plan.keys)), "other"]
        keys = [mint(key, Role.AGENT, ttl_s=_TOKEN_S, run_id=RUN_ID, name=name) for name in names]
        spec = {"name": "talk", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        run = await client.submit(spec, RUN_ID)
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(client.claim(run.run_id))
            published = await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
            address = cluster.process["coordinator"].address
            version = str(published.version)
            workers = await _process(stack, "stream_workers", address, str(model), version)
            await order(workers, "open", workers=plan.workers, slots=plan.slots)
            probe = await _gateway(cluster, key, plan)
            gateway = cluster.process["gateway"]
            clients = await _process(stack, "stream_clients", gateway.address, RUN_ID)
            pids = {"gateway": gateway.pid, "coordinator": cluster.pid("coordinator"), "redis": cluster.pid("redis")}
            pids["workers"] = workers.pid
            town = cls(gateway.address, pids, probe, clients, tuple(keys[:-1]), keys[-1])
            await wait_until(town._answers, timeout=_BOOT_S, interval=1.0, what="an answer")
            yield town

    async def _answers(self) -> bool:
        """Whether a completion is answered. The first one has the gateway load the run's model."""
        connection = await Connection.open(self.gateway)
        try:
            sent = unary_requests(RUN_ID, self.other_key)["completion"]
            return (await connection.ask(sent)).status == 200
        finally:
            connection.close()


async def _gateway(cluster: Cluster, key: Ed25519PrivateKey, plan: StreamPlan) -> Path:
    """Start a gateway as a run with tools has one, with room for unary calls beside all streams. Returns its probe."""
    keys, probe = cluster.directory / "tokens.pub", cluster.directory / "gateway.probe"
    keys.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    cluster.environment["gateway"] = {"EBBTIDE_PROBE": str(probe)}
    await cluster.start(
        "gateway",
        "benchmarks.gateway.probed_gateway",
        boot_s=_BOOT_S,
        listen="127.0.0.1:0",
        coordinator=cluster.process["coordinator"].address,
        holder="benchmark",
        door_token_keys=keys,
        tool_parser=TOOL_PARSER,
        reasoning_parser=REASONING_PARSER,
        limits_requests=max(plan.many, plan.few + plan.one_key) + 256,
    )
    return probe


async def _process(stack: AsyncExitStack, module: str, *args: str) -> asyncio.subprocess.Process:
    """Start a process that takes orders. It ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"benchmarks.gateway.{module}", *args),
        env={**os.environ, "EBBTIDE_TOKEN": TOKEN, **code_of(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 28,
    )
    stack.push_async_callback(_end, process)
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
