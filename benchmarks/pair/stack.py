"""Everything of a pair but its guard: the serving engine, a cluster with one borrowed worker, and a run's rollouts.

Threads decide everything where engines share cores. The served engine has both cores, and threads that sleep while they
wait (spinning ones ruin both engines); the rollout engine has one thread, which on so small a network makes as many
tokens as two. The split's serving engine has one thread and one core.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from safetensors.torch import load_file

from benchmarks.pair.feeding import LONGEST, PROMPT, SHORTEST, Feeding, feeding
from ebbtide.client import Lease
from ebbtide.local_cluster.launcher import ProgramProcess
from ebbtide.local_cluster.local_cluster import free_address
from ebbtide.local_cluster.serving_checkpoint import ServedNetwork, served_model
from ebbtide.local_cluster.serving_engine import serving_engine
from tests.chaos.cluster import Cluster
from tests.support.waiting import wait_until

RUN: Final = "pair"
CACHE: Final = Path(__file__).parents[2] / "runs" / "bench-coserving"
#: 25 M parameters. Keys and values of a token: 8 layers, 2 heads and 64 dimensions each.
_SERVED: Final = ServedNetwork(kv_heads=2)
_TOKEN_NUMBERS: Final = 8 * 2 * 2 * 64
#: 4 M parameters, whose decode steps take much the same time for few as for many rollouts, as on a GPU; as many keys
#: and values of a token.
_ROLLOUTS: Final = ServedNetwork(hidden=256, layers=4, heads=4, kv_heads=4, feed_forward=768)
MODEL: Final = "served"
WORKER: Final = "borrowed"
#: Rollouts in the engine at once, and open in all: about as many whole contexts as ROSE's machines have memory for (an
#: 8B model, 32 thousand tokens each, four fifths of 80 GB less the weights: seven).
SLOTS: Final = 8
_OPEN: Final = 64
#: Of one step: those of all slots, and a part of a prompt. A reclaim waits for the step that is under way.
_STEP_TOKENS: Final = 32
#: A host that was given up is tried again in half a minute, then after twice as long.
_WANTED_S: Final = 300.0
_SLEEPING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}


class EngineSizes(Struct, frozen=True, kw_only=True):
    """Both engines' type of numbers, and the memory for their keys and values. As many tokens fit in either type."""

    dtype: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, of either engine."""
        return _TOKEN_NUMBERS * self._bytes

    @property
    def kv_mib(self) -> int:
        """Room for all slots' longest texts. What of it may be used is the guard's to say."""
        return 32 * self._bytes

    @property
    def serving_kv_mib(self) -> int:
        """Of the served engine, 3072 tokens: half a dozen usual requests, or one of the longest."""
        return 6 * self._bytes

    @property
    def memory_mib(self) -> int:
        """For both engines: rollouts fill most of the four fifths that ROSE gives them, and bursts of served requests
        take up to two fifths."""
        return 14 * self._bytes

    @property
    def engine(self) -> str:
        """The rollout engine's configuration."""
        lines = (
            "[vllm]",
            f'dtype = "{self.dtype}"',
            "enforce_eager = true",
            "threads = 1",
            f"kv_cache_mib = {self.kv_mib}",
            "max_model_len = 2048",
        )
        return "\n".join(lines) + "\n"

    @property
    def _bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


class Pair:
    """Made by `pair`. `grants` is the folder that a guard and the worker share."""

    def __init__(self, directory: Path, sizes: EngineSizes) -> None:
        self.directory, self.sizes = directory, sizes
        self.cluster = Cluster(directory)
        self.grants = directory / "grants"
        self.cores = os.sched_getaffinity(0)
        self.guard_pid = 0
        self.feed: Feeding
        self.serving: dict[str, ProgramProcess] = {}

    async def serve(self, name: str, threads: int, cores: set[int] | None = None) -> str:
        """Boot a serving engine, or find it booted. Its address as a URL."""
        if name not in self.serving:
            address = free_address()
            log = self.directory / f"{name}.log"
            program = serving_engine(
                served_model(CACHE, _SERVED),
                MODEL,
                address,
                log,
                threads=threads,
                kv_mib=self.sizes.serving_kv_mib,
                dtype=self.sizes.dtype,
                name=name,
            )
            process = self.serving[name] = ProgramProcess(program)
            if cores is not None:
                os.sched_setaffinity(process.pid, cores)
            await process.wait_ready()
        return self.url(name)

    def url(self, name: str) -> str:
        return f"http://{self.serving[name].address}"

    def books(self) -> dict[str, int]:
        """Over all rollouts that finished: tokens that were made but not kept, finishes that came twice or short."""
        made, feed = self.generated(), self.feed
        lost = sum(max(0, made.get(name, 0) - tokens) for name, tokens in feed.finished.items())
        return {
            "rollouts": len(feed.finished),
            "tokens": sum(feed.finished.values()),
            "lost": lost,
            "twice": feed.twice,
            "short": feed.short,
            "aborted": len(feed.aborted),
            "unfinished": len(feed.open),
        }

    def generated(self) -> dict[str, int]:
        """Tokens that left the rollout engine, by rollout."""
        made: dict[str, int] = {}
        for record in self.cluster.ledger(WORKER):
            made[record.rollout_id] = made.get(record.rollout_id, 0) + record.generated
        return made

    async def lent(self) -> None:
        """Wait until the coordinator wants the worker, whatever it thought of it under another policy."""
        client = self.cluster.client()

        async def wanted() -> bool:
            return any(one.worker_id == WORKER and not one.given_up for one in await client.workers())

        await wait_until(wanted, timeout=_WANTED_S, what="the coordinator to want the worker again")

    async def drained(self) -> None:
        """Ask for nothing more, and wait until all that was asked for has finished."""
        self.feed.stop()
        await wait_until(lambda: not self.feed.open, timeout=600, what="the end of all rollouts")

    def pin(self, cores: set[int]) -> None:
        """Bind the rollout engine and its worker, with all their threads, to these cores."""
        for pid in _tree(self.cluster.pid(WORKER)):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)


@asynccontextmanager
async def pair(directory: Path, seed: int, sizes: EngineSizes) -> AsyncIterator[Pair]:
    """Everything up, the policy's first version installed, and rollouts waiting for a grant."""
    made = Pair(directory, sizes)
    made.grants.mkdir(mode=0o700)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, made)
        client = await made.cluster.boot(workers=0, heartbeat_s=1.0, heartbeat_timeout_s=5.0)
        base = served_model(CACHE, _ROLLOUTS, seed=2)
        await _worker(made, base)
        await client.submit(
            {"name": RUN, "model": base.name, "environment": {"name": "none"}, "quota_bytes": 1 << 30}, RUN
        )
        lease: Lease = await stack.enter_async_context(client.claim(RUN, holder="benchmark"))
        await lease.publish(load_file(base / "model.safetensors"), step=0)
        made.feed = await stack.enter_async_context(feeding(lease, _OPEN, seed))
        yield made


def setting(sizes: EngineSizes) -> dict[str, Any]:
    """What all measurements of a pair have in common, besides the code."""
    return {
        "slots": SLOTS,
        "step_tokens": _STEP_TOKENS,
        "open": _OPEN,
        "kv_mib": sizes.kv_mib,
        "serving_kv_mib": sizes.serving_kv_mib,
        "memory_mib": sizes.memory_mib,
        "token_bytes": sizes.token_bytes,
        "engine": sizes.engine,
        "prompt": PROMPT,
        "response": (SHORTEST, LONGEST),
    }


async def installed(made: Pair) -> None:
    """Wait until the worker has the policy: an install waits for a grant."""
    client = made.cluster.client()

    async def has() -> bool:
        return any(one.installed for one in await client.workers())

    await wait_until(has, timeout=120, what="the policy at the worker")


async def _worker(made: Pair, base: Path) -> None:
    config = made.directory / "worker.toml"
    config.write_text(made.sizes.engine)
    made.cluster.environment[WORKER] = _SLEEPING
    flags: dict[str, Any] = {
        "engine": "vllm",
        "model": base,
        "config": config,
        "slots": SLOTS,
        "step_tokens": _STEP_TOKENS,
        "kind": "borrowed",
        "grant_dir": made.grants,
        "flush_tokens": 128,  # more than a rollout makes between two acknowledgements
        "flush_interval_ms": 250,
        "boot_s": 180.0,
    }
    await made.cluster.worker(WORKER, **flags)


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    import psutil

    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


async def _close(made: Pair) -> None:
    for process in made.serving.values():
        await process.stop()
    await made.cluster.close()


async def settle(seconds: float) -> None:
    """Let what ran die down; there is no condition to wait for in a measurement's pause."""
    await asyncio.sleep(seconds)
