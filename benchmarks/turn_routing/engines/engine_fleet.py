"""Two real vLLM engines with prefix caches, on a core each, under a live coordinator.

Invariant: the rule's file names the rule under which turns are placed from now on.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from msgspec import Struct
from safetensors.numpy import load_file

from benchmarks.real_kills.checkpoint import make_checkpoint
from benchmarks.turn_routing.engines.ruled_coordinator import OURS, RULE_FILE
from ebbtide.client import Client, Lease
from tests.chaos.cluster import Cluster
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

VOCABULARY: Final = 128
CONTEXT: Final = 4096
SLOTS: Final = 8
WORKERS: Final = ("w1", "w2")
_RUN: Final = "routed"
_BOOT_S: Final = 400.0
_METRIC: Final = re.compile(r'^ebbtide_worker_prompt_tokens_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
#: The cache holds all sessions of a block. It knows prefixes by whole blocks: vLLM's default on CPUs, 128 tokens, would
#: be a large part of these sessions.
_ENGINE_ARGS: Final = '{"block_size": 32}'


class PromptTokens(Struct, frozen=True):
    """Of all engines, by their own count: tokens of prompts that they read, and those that they had."""

    read: int
    cached: int

    def since(self, before: "PromptTokens") -> "PromptTokens":
        return PromptTokens(self.read - before.read, self.cached - before.cached)


class EngineFleet:
    """Made by `running`."""

    def __init__(self, cluster: Cluster, client: Client, lease: Lease, rule: Path) -> None:
        self.cluster, self.client, self.lease = cluster, client, lease
        self._rule = rule

    @classmethod
    @asynccontextmanager
    async def running(cls, cluster: Cluster) -> AsyncIterator["EngineFleet"]:
        rule = cluster.directory / "rule"
        rule.write_text(OURS)
        client = await _boot(cluster, rule)
        model = cluster.directory / "model"
        await asyncio.to_thread(
            make_checkpoint, model, 1, vocab_size=VOCABULARY, hidden_size=384, layers=6, positions=CONTEXT
        )
        config = cluster.directory / "worker.toml"
        config.write_text(engine_config(CONTEXT, kv_cache_mib=512, engine_args=_ENGINE_ARGS))
        flags: dict[str, Any] = {"engine": "vllm", "model": model, "config": config, "slots": SLOTS, "metrics_port": 0}
        windows: dict[str, Any] = {"flush_tokens": 32, "flush_interval_ms": 250}
        await asyncio.gather(*(cluster.worker(name, boot_s=_BOOT_S, **flags, **windows) for name in WORKERS))
        await client.submit({"name": "routed", "model": str(model), "environment": {"name": "none"}}, _RUN)
        async with client.claim(_RUN) as lease:
            await lease.publish(load_file(model / "model.safetensors"), step=0)
            fleet = cls(cluster, client, lease, rule)
            await wait_until(fleet._installed, _BOOT_S, what="weights at both workers")
            yield fleet

    def place_by(self, rule: str) -> None:
        self._rule.write_text(rule)

    async def prompt_tokens(self) -> PromptTokens:
        pages = await asyncio.gather(*(asyncio.to_thread(self._metrics, name) for name in WORKERS))
        found = [dict(_METRIC.findall(page)) for page in pages]
        read, cached = (sum(int(float(one.get(name, 0))) for one in found) for name in ("read", "cached"))
        return PromptTokens(read, cached)

    async def learnt_prefills(self) -> dict[str, float]:
        """Tokens/s at which the workers read prompts, as the coordinator has learnt."""
        return {one.worker_id: round(one.prefill_tokens_per_s) for one in await self.client.workers()}

    async def _installed(self) -> bool:
        return sum(bool(one.installed) for one in await self.client.workers()) == len(WORKERS)

    def _metrics(self, name: str) -> str:
        port = json.loads((self.cluster.directory / f"{name}.json").read_text())["metrics"]
        with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            return str(page.read().decode())


async def _boot(cluster: Cluster, rule: Path) -> Client:
    """Redis, the coordinator with a rule, a relay. Nothing moves: the rules are compared by where they place."""
    await asyncio.to_thread(cluster.store)
    cluster.environment["coordinator"] = {RULE_FILE: str(rule)}
    module = "benchmarks.turn_routing.engines.ruled_coordinator"
    flags: dict[str, Any] = {"server_listen": "127.0.0.1:0", "store_url": cluster.redis.url, "no_rebalance": True}
    await cluster.start("coordinator", module, boot_s=_BOOT_S, **flags)
    await cluster.relay()
    return cluster.client()
