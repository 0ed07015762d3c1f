"""Gateways before a whole cluster of processes, whose engines follow a script."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest

from ebbtide.client import Client, Lease
from tests.chaos.cluster import TOKEN, Cluster
from tests.fakes.model_texts import save_chat_model
from tests.fakes.scripted_engine import follow
from tests.fakes.scripted_settings import ScriptedSettings

#: The ids of the tests' tokenizer. Nothing ends a response but its length.
SCRIPT: Final = ScriptedSettings(step_s=0.02, vocab_size=424, mean_length=0)


class GatewayStand:
    """A cluster with one run, and gateways by their names."""

    def __init__(self, cluster: Cluster, client: Client, lease: Lease) -> None:
        """`lease`: of the run's trainer."""
        self.cluster, self.client, self.lease, self.run_id = cluster, client, lease, lease.run_id
        self._clients: list[openai.AsyncOpenAI] = []

    async def gateway(self, name: str, **settings: Any) -> openai.AsyncOpenAI:
        """Start one, and return a client of it that never tries again."""
        coordinator = self.cluster.process["coordinator"].address
        listen = "127.0.0.1:0"
        await self.cluster.start(name, "gateway", listen=listen, coordinator=coordinator, holder=name, **settings)
        url = f"http://{self.cluster.process[name].address}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        self._clients.append(client)
        return client

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that any engine makes of a prompt."""
        return [token for token, _ in follow(SCRIPT, prompt, count)]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture
async def stand(cluster: Cluster, tmp_path: Path) -> AsyncIterator[GatewayStand]:
    cluster.script = SCRIPT
    client = await cluster.boot(workers=2, heartbeat_s=0.5, heartbeat_timeout_s=2.0)
    model = save_chat_model(tmp_path / "model")
    spec = {"name": "spell", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
    run = await client.submit(spec, "spell-1")
    async with client.claim(run.run_id) as lease:
        await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
        made = GatewayStand(cluster, client, lease)
        yield made
        await made.close()
