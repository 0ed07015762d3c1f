"""How soon a token reaches its reader, and what that costs the coordinator.

    python -m benchmarks.token_latency [--interactive N] [--batch N] [--workers N] [--step-ms MS] [--seconds S]

Real processes on this machine: Redis that syncs every write, a coordinator, a relay, and workers whose engines follow a
script. Workers generate batch and interactive rollouts together, with their default windows. As many batch rollouts are
read as interactive ones. A latency is the time from a token's leaving the engine to the moment at which the SDK has
handed its chunk to the reader, in another process; a gap is the time between two chunks of one rollout. Prints and
writes the figures with the conditions that they hold under; says nothing of machines that are otherwise loaded.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import Struct

from benchmarks.arguments import count, factor, output, result
from benchmarks.conditions import conditions
from benchmarks.control_plane.measures import cpu_s, spread
from benchmarks.token_latency.stamped_engine import age_s
from ebbtide.client import Client
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens
from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, SPEC, publish
from tests.fakes.scripted_settings import ScriptedSettings, write_script
from tests.support.waiting import wait_until

_ENGINE: Final = "benchmarks.token_latency.stamped_engine:make"
#: The windows that workers have by default.
_WINDOW: Final = {"flush_tokens": 32, "flush_interval_ms": 250}
#: More tokens than any rollout makes while it is measured.
_ENDLESS: Final = 1 << 16
#: Rollouts generate for so long before they are measured, because readers join and rollouts are placed meanwhile.
_SETTLE_S: Final = 3.0


class LatencyPlan(Struct, frozen=True, kw_only=True):
    interactive: int
    batch: int
    workers: int
    step_ms: float
    seconds: float


class Latencies:
    """What the readers of one kind of rollouts saw while `open`, in seconds."""

    def __init__(self) -> None:
        self.open = False
        self.first: list[float] = []  # from the first token of each rollout, whether open or not
        self.tokens: list[float] = []
        self.gaps: list[float] = []

    async def read(self, client: Client, rollout_id: str) -> None:
        before = 0.0
        async for chunk in client.stream_tokens(RUN, rollout_id):
            now = time.monotonic()
            ages = [age_s(float(logprob), now) for logprob in unpack_tokens(chunk.tokens)["logprob"]]
            if not chunk.offset:
                self.first.append(ages[0])
            if self.open:
                self.tokens += ages
                self.gaps += [now - before] if before else []
            before = now

    def figures(self, name: str) -> dict[str, Any]:
        parts = {"first_token": self.first, "token": self.tokens, "gap": self.gaps}
        return {f"{name}_{part}_{k}": v for part, seen in parts.items() for k, v in spread(seen, "ms", 1e3).items()}


def _request(name: str, *, interactive: bool) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=name,
        group_id=name,
        episode_id=name,
        prompt_ids=pack_ids(range(2, 34)),
        sampling=Sampling(max_tokens=_ENDLESS, ignore_eos=True),
        interactive=interactive,
    )


@asynccontextmanager
async def _fleet(directory: Path, plan: LatencyPlan) -> AsyncIterator[tuple[Cluster, Client]]:
    cluster = Cluster(directory)
    script = write_script(ScriptedSettings(step_s=plan.step_ms / 1e3, max_model_len=2 * _ENDLESS))
    try:
        client = await cluster.boot(workers=0)
        slots = -(-(plan.batch + plan.interactive) // plan.workers) + 1
        names = [f"w{number}" for number in range(plan.workers)]
        settings: dict[str, Any] = {"engine": _ENGINE, "engine_options": script, "slots": slots, **_WINDOW}
        await asyncio.gather(*(cluster.worker(name, **settings) for name in names))
        yield cluster, client
    finally:
        await cluster.close()


async def measure(plan: LatencyPlan, directory: Path) -> dict[str, Any]:
    """The figures by name."""
    async with _fleet(directory, plan) as (cluster, client):
        await client.submit(SPEC, RUN)
        lease = await client.acquire(RUN, holder="benchmark")
        await publish(lease, step=0)
        batch = [_request(f"b{number}", interactive=False) for number in range(plan.batch)]
        chats = [_request(f"c{number}", interactive=True) for number in range(plan.interactive)]
        seen = {"batch": Latencies(), "interactive": Latencies()}
        read = {"batch": batch[: plan.interactive], "interactive": chats}
        readers = [
            asyncio.create_task(seen[kind].read(client, request.rollout_id))
            for kind, requests in read.items()
            for request in await _submitted(lease, requests)
        ]
        await _submitted(lease, batch[plan.interactive :])
        try:
            cost = await _window(cluster, plan, list(seen.values()), readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return {**seen["interactive"].figures("interactive"), **seen["batch"].figures("batch"), **cost}


async def _submitted(lease: Any, requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
    await lease.submit_rollouts(requests)
    return requests


async def _window(
    cluster: Cluster, plan: LatencyPlan, seen: Sequence[Latencies], readers: Sequence[asyncio.Task[None]]
) -> dict[str, Any]:
    """Measure for the plan's seconds. Returns what the time cost."""
    await wait_until(lambda: all(len(one.first) == plan.interactive for one in seen), timeout=60, what="first tokens")
    await asyncio.sleep(_SETTLE_S)
    pids = {name: cluster.pid(name) for name in ("coordinator", "redis")}
    before, made, began = {name: cpu_s(pid) for name, pid in pids.items()}, cluster.generated(), time.monotonic()
    for one in seen:
        one.open = True
    await asyncio.sleep(plan.seconds)
    for one in seen:
        one.open = False
    tokens, took = cluster.generated() - made, time.monotonic() - began
    for reader in readers:
        if reader.done():
            reader.result()
            raise RuntimeError("a rollout ended while it was measured")
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    return {
        "tokens_per_s": round(tokens / took),
        **{f"{name}_cpu_s_per_mtok": round(seconds / max(1, tokens) * 1e6, 2) for name, seconds in used.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactive", type=count, default=20, help="interactive rollouts, all of them read")
    parser.add_argument("--batch", type=count, default=108, help="batch rollouts, as many of them read")
    parser.add_argument("--workers", type=count, default=4)
    parser.add_argument("--step-ms", type=factor, default=30.0, help="time between two tokens of a rollout")
    parser.add_argument("--seconds", type=factor, default=20.0)
    parser.add_argument("--out", type=output, help="file for the figures")
    given = vars(parser.parse_args())
    out, plan = given.pop("out") or result("token_latency"), LatencyPlan(**given)
    if plan.batch < plan.interactive:
        parser.error("--batch must be at least --interactive: as many of them are read")
    with tempfile.TemporaryDirectory(prefix="ebbtide-latency-") as directory:
        before = conditions()
        figures = uvloop.run(measure(plan, Path(directory)))
    print(json.dumps(figures, indent=2))
    out.write_text(json.dumps({"figures": figures, "conditions": before, "plan": given}, indent=2) + "\n")


if __name__ == "__main__":
    main()
