"""A real gateway with a real run, and a worker on vLLM's CPU build, on the loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct
from safetensors.numpy import load_file

from tests.chaos.cluster import TOKEN, Cluster
from tests.clients.bigram_model import save_bigram_model
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

RUN_ID: Final = "clients-1"
_CONTEXT: Final = 32_768
_SLOTS: Final = 16
_BOOT_S: Final = 400.0


class Stand(Struct, frozen=True):
    """Where clients find the gateway, and what they say of themselves there."""

    url: str
    key: str
    run_id: str
    model: Path

    def trace(self, session: str) -> dict[str, Any]:
        """All of a session. Raises `httpx.HTTPError`."""
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=60) as client:
            answer = client.get(f"/v1/sessions/{session}", params={"model": self.run_id, "limit": 1000})
        answer.raise_for_status()
        trace: dict[str, Any] = answer.json()
        return trace


@asynccontextmanager
async def clients_stand(folder: Path) -> AsyncIterator[Stand]:
    """Redis, coordinator, relay, worker and gateway as processes, and a trainer that has published one version."""
    model = save_bigram_model(folder / "model", context=_CONTEXT)
    cluster = Cluster(folder)
    try:
        client = await cluster.boot(workers=0)
        config = folder / "worker.toml"
        config.write_text(engine_config(_CONTEXT, kv_cache_mib=128))
        await cluster.worker("w1", engine="vllm", model=model, config=config, slots=_SLOTS, boot_s=_BOOT_S)
        spec = {"name": "clients", "model": str(model), "environment": {"name": "agents"}, "trainer": _TRAINER}
        run = await client.submit(spec, RUN_ID)
        async with client.claim(run.run_id) as lease:
            await lease.publish(load_file(model / "model.safetensors"), step=0)

            async def installed() -> Any:
                return [one for one in await client.workers() if one.installed]

            await wait_until(installed, timeout=_BOOT_S, what="weights at the worker")
            head = cluster.process["coordinator"].address
            flags: dict[str, Any] = {"listen": "127.0.0.1:0", "coordinator": head, "holder": "clients"}
            process = await cluster.start("gateway", "gateway", boot_s=_BOOT_S, tool_parser="hermes", **flags)
            yield Stand(f"http://{process.address}", TOKEN, run.run_id, model)
    finally:
        await cluster.close()


_TRAINER: Final = {"name": "external"}
