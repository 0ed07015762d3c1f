"""A gateway before one real engine, and vLLM's own server with the same engine, both on this machine's cores.

Both engines are float32 on one thread, with the same model, context and cache, so that one that idles costs the other
nothing. Their processes are started one after another.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import openai
from msgspec import Struct
from safetensors.numpy import load_file

from benchmarks.gateway.gateway_plan import AT_ONCE
from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.client import Client
from ebbtide.free_ports import free_port
from ebbtide.local_cluster.launcher import ProgramProcess
from ebbtide.local_cluster.serving_engine import serving_engine
from tests.chaos.cluster import TOKEN, Cluster
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

RUN_ID: Final = "beside-1"
VOCABULARY: Final = 128
#: As long as the checkpoint's positions.
_CONTEXT: Final = 1024
_CACHE_MIB: Final = 128
_BOOT_S: Final = 400.0


class TimedServer(Struct, frozen=True):
    """A server of OpenAI's routes. `pid`: the process that speaks HTTP."""

    client: openai.AsyncOpenAI
    model: str
    pid: int


def checkpoint(directory: Path) -> Path:
    """A model whose step takes some milliseconds on one core."""
    return make_checkpoint(directory / "model", 1, vocab_size=VOCABULARY, hidden_size=384, layers=6)


@asynccontextmanager
async def gateway_server(cluster: Cluster, model: Path) -> AsyncIterator[TimedServer]:
    """A gateway, a coordinator with Redis that syncs every write, a relay, and a worker with its default windows."""
    client = await cluster.boot(workers=0)
    config = cluster.directory / "worker.toml"
    config.write_text(engine_config(_CONTEXT, kv_cache_mib=_CACHE_MIB))
    windows: dict[str, Any] = {"flush_tokens": 32, "flush_interval_ms": 250}
    await cluster.worker("w1", engine="vllm", model=model, config=config, slots=2 * AT_ONCE, boot_s=_BOOT_S, **windows)
    spec = {"name": "beside", "model": str(model), "environment": {"name": "none"}, "trainer": {"name": "external"}}
    run = await client.submit(spec, RUN_ID)
    async with client.claim(run.run_id) as lease:
        await lease.publish(load_file(model / "model.safetensors"), step=0)
        await _installed(client)
        coordinator = cluster.process["coordinator"].address
        process = await cluster.start(
            "gateway", "gateway", boot_s=_BOOT_S, listen="127.0.0.1:0", coordinator=coordinator, holder="benchmark"
        )
        async with _client(process.address) as http:
            yield TimedServer(http, RUN_ID, process.pid)


@asynccontextmanager
async def vllm_server(directory: Path, model: Path, *, stream_interval: int) -> AsyncIterator[TimedServer]:
    """vLLM's OpenAI server, which sends events every `stream_interval` tokens."""
    address, log = f"127.0.0.1:{free_port()}", directory / "vllm.log"
    program = serving_engine(model, "served", address, log, threads=1, kv_mib=_CACHE_MIB, dtype="float32")
    # Of an option that is given twice, the later one counts.
    more = ("--max-model-len", str(_CONTEXT), "--stream-interval", str(stream_interval))
    process = ProgramProcess(msgspec.structs.replace(program, command=(*program.command, *more), boot_s=_BOOT_S))
    try:
        await process.wait_ready()
        async with _client(address) as http:
            yield TimedServer(http, "served", process.pid)
    finally:
        process.kill()


async def _installed(client: Client) -> None:
    async def found() -> Any:
        return [one for one in await client.workers() if one.installed]

    await wait_until(found, timeout=_BOOT_S, what="weights at the worker")


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=TOKEN, max_retries=0)
    try:
        yield client
    finally:
        await client.close()
