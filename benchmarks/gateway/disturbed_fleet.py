"""A cluster of processes with two gateways, and the kills that it goes through.

Invariant: `gateways` holds the clients of both; `gone` names the killed one once it was killed, and it stays away.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import numpy as np
import openai

from benchmarks.gateway.gateway_plan import GatewayPlan
from ebbtide.client import Client
from tests.chaos.cluster import TOKEN, Cluster
from tests.fakes.model_texts import save_chat_model
from tests.fakes.scripted_settings import ScriptedSettings

RUN_ID: Final = "talk-1"
#: What each engine makes of a prompt. The vocabulary is that of the gateways' tokenizer, with all special tokens.
SCRIPT: Final = ScriptedSettings(step_s=0.05, vocab_size=424, mean_length=0)
_GATEWAYS: Final = ("g1", "g2")
#: A program that is started among kills shares its cores with all others.
_BOOT_S: Final = 300.0

Notify = Callable[[str], None]


class DisturbedFleet:
    """Made by `running`."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client = cluster, client
        self.gateways: dict[str, openai.AsyncOpenAI] = {}
        self.gone: set[str] = set()
        self.kills: list[str] = []
        self.tells_traces = False  # whether the gateways have a route for a session's trace
        self._living: list[str] = []
        self._joined = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster, *, workers: int) -> AsyncIterator["DisturbedFleet"]:
        """Everything is started, and the run has a version."""
        cluster.script = SCRIPT
        client = await cluster.boot(workers=0, heartbeat_s=0.5, heartbeat_timeout_s=5.0)
        model = save_chat_model(cluster.directory / "model")
        spec = {"name": "talk", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        run = await client.submit(spec, RUN_ID)
        async with client.claim(run.run_id) as lease:
            await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
            fleet = cls(cluster, client)
            for _ in range(workers):
                await fleet._join()
            for name in _GATEWAYS:
                await fleet._gateway(name)
            fleet.tells_traces = await fleet._has_traces()
            yield fleet
            for one in fleet.gateways.values():
                await one.close()

    async def disturb(self, plan: GatewayPlan, random: Random, notify: Notify) -> None:
        """Kill workers, each replaced before the next, and among these kills coordinator, Redis and a gateway once."""
        others: list[Callable[[], Any]] = [self._restart_coordinator, self._restart_redis, self._lose_gateway]
        random.shuffle(others)
        # Evenly among the kills of workers, so that each falls into a fleet that is being disturbed.
        places = {plan.worker_kills * (number + 1) // (len(others) + 1): one for number, one in enumerate(others)}
        for number in range(plan.worker_kills):
            if number in places:
                await places[number]()
                notify(f"{self.kills[-1]} killed")
            began = time.monotonic()
            await self._replace_busiest()
            await asyncio.sleep(max(0.0, plan.pause_s - (time.monotonic() - began)))
        notify(f"{sum(one.startswith('w') for one in self.kills)} workers killed")

    def other(self, gateway: str) -> str:
        """The gateway to which a client of `gateway` turns."""
        return next(name for name in _GATEWAYS if name != gateway)

    async def _has_traces(self) -> bool:
        try:
            await self.gateways[_GATEWAYS[0]].get("/sessions", cast_to=object)
        except openai.NotFoundError:
            return False
        return True

    async def _replace_busiest(self) -> None:
        running = {one.worker_id: one.running for one in await self.client.workers()}
        victim = max(self._living, key=lambda name: running.get(name, 0))
        self._living.remove(victim)
        self._kill(victim)
        await self._join()

    async def _restart_coordinator(self) -> None:
        self._kill("coordinator")
        await self.cluster.coordinator(boot_s=_BOOT_S)

    async def _restart_redis(self) -> None:
        self._kill("redis")
        await asyncio.to_thread(self.cluster.store)

    async def _lose_gateway(self) -> None:
        self.gone.add(_GATEWAYS[0])
        self._kill(_GATEWAYS[0])

    def _kill(self, name: str) -> None:
        self.cluster.kill(name)
        self.kills.append(name)

    async def _join(self) -> None:
        self._joined += 1
        name = f"w{self._joined}"
        await self.cluster.worker(name, boot_s=_BOOT_S)
        self._living.append(name)

    async def _gateway(self, name: str) -> None:
        coordinator = self.cluster.process["coordinator"].address
        process = await self.cluster.start(
            name, "gateway", boot_s=_BOOT_S, listen="127.0.0.1:0", coordinator=coordinator, holder=name
        )
        url = f"http://{process.address}/v1"
        self.gateways[name] = openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
