"""Three workers with real engines, and those that take the places of the killed ones.

Invariant: `living` are attached and were not killed; there are never more than three.
"""

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec import Struct

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.client import Client
from tests.chaos.cluster import Cluster
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

WORKERS: Final = 3
SLOTS: Final = 32
#: The flush window that workers have by default: what a kill may cost each rollout.
FLUSH_TOKENS: Final = 32
FLUSH_INTERVAL_MS: Final = 250
#: A victim's last tokens: so few that a response of 128 tokens to each of 64 prompts lasts for two kills.
MOMENT: Final = (20, 1200)


class Kill(Struct, frozen=True):
    """`at`: wall-clock time."""

    worker: str
    at: float


class Fleet:
    """Made in a directory of its own; `boot` first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.living: list[str] = []
        self.kills: list[Kill] = []
        self._joined = 0
        self._flags: dict[str, Any] = {}
        self._boots: list[float] = []

    @property
    def boot_s(self) -> float:
        """Mean time from a worker's start to its being attached."""
        return sum(self._boots) / len(self._boots)

    async def boot(self) -> tuple[Client, Path]:
        """Start everything. Returns a client, and a checkpoint that is not the one the engines booted from."""
        base, other = (make_checkpoint(self.cluster.directory / f"checkpoint-{seed}", seed) for seed in (1, 2))
        config = self.cluster.directory / "worker.toml"
        config.write_text(engine_config(512))
        self._flags = {
            "engine": "vllm",
            "model": base,
            "config": config,
            "slots": SLOTS,
            "kind": "spot",
            "flush_tokens": FLUSH_TOKENS,
            "flush_interval_ms": FLUSH_INTERVAL_MS,
            "boot_s": 180.0,
        }
        client = await self.cluster.boot(workers=0, heartbeat_s=1.0, heartbeat_timeout_s=2.5)
        await asyncio.gather(*(self.join() for _ in range(WORKERS)))
        return client, other

    async def join(self) -> None:
        self._joined += 1
        began, name = time.monotonic(), f"w{self._joined}"
        await self.cluster.worker(name, **self._flags)
        self._boots.append(time.monotonic() - began)
        self.living.append(name)

    async def refill(self) -> None:
        """Bring the fleet back to its size, all at once. Best while nothing is generated: a boot takes a whole core."""
        await asyncio.gather(*(self.join() for _ in range(WORKERS - len(self.living))))

    async def serving(self, client: Client) -> None:
        """Wait until all that live have the weights: one that has not gets no work, and may find none left."""

        async def all_have() -> bool:
            serving = {one.worker_id for one in await client.workers() if one.installed}
            return serving.issuperset(self.living)

        await wait_until(all_have, timeout=60, what="weights at every worker")

    async def kill(self, random: Random) -> None:
        """SIGKILL to one that lives, with all its processes, after so many tokens more of its own."""
        victim = random.choice(self.living)
        least = self._generated(victim) + random.randrange(*MOMENT)
        await wait_until(lambda: self._generated(victim) >= least, timeout=120, what=f"work of {victim}")
        self.living.remove(victim)
        at = time.time()
        self.cluster.kill(victim)
        self.kills.append(Kill(victim, at))

    def _generated(self, worker: str) -> int:
        return sum(record.generated for record in self.cluster.ledger(worker))
