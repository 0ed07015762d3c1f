"""What a run takes in Redis, by the coordinator's own scripts: `python -m benchmarks.store_size`.

Rollouts are submitted, placed, appended to in flushes and completed; Redis says what it uses at each stage, and how
long its append-only file is. One JSON object for each length of the responses.
"""

import asyncio
import json
from typing import Final

from ebbtide.append_stream import AppendColumns
from ebbtide.store.connection import StoreConnection
from ebbtide.store.store import Store
from ebbtide.types.rollout import Episode, RolloutRequest, Trajectory
from ebbtide.types.run import EnvironmentSpec, LeaseRef, RunSpec, Sampling
from ebbtide.types.tokens import pack_ids, pack_tokens
from tests.support.redis_servers import EmbeddedRedis

ROLLOUTS: Final = 256
PROMPT: Final = 200
#: As workers flush: up to half of a window of 32 tokens.
FLUSH: Final = 16
RUN: Final = "r"


def used(server: EmbeddedRedis) -> int:
    return int(server.info("used_memory"))


def request(number: int, length: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"run.s0.g{number // 8}.{number % 8}",
        group_id=f"run.s0.g{number // 8}",
        episode_id=f"run.s0.g{number // 8}.{number % 8}",
        prompt_ids=pack_ids(range(PROMPT)),
        sampling=Sampling(max_tokens=length),
    )


async def generate(store: Store, requests: list[RolloutRequest], length: int) -> None:
    names = [one.rollout_id for one in requests]
    await store.rollouts.place(RUN, [(name, f"attempt-{name}", "worker") for name in names])
    attempts = [f"attempt-{name}" for name in names]
    for offset in range(0, length, FLUSH):
        count = min(FLUSH, length - offset)
        tokens = pack_tokens(range(offset, offset + count), [-0.5] * count, 1) * len(names)
        ends, counts = [offset + count] * len(names), [count] * len(names)
        refused = await store.appends.append(AppendColumns(RUN, names, attempts, ends, counts, tokens, {}))
        if refused:
            raise RuntimeError(f"{len(refused)} of {len(names)} deltas were not stored")


async def complete(store: Store, lease: LeaseRef, requests: list[RolloutRequest], length: int) -> None:
    tokens = pack_tokens(range(length), [-0.5] * length, 1)
    for one in requests:
        trajectory = Trajectory(
            episode_id=one.episode_id,
            group_id=one.group_id,
            step=0,
            group_size=8,
            prompt_ids=one.prompt_ids,
            tokens=tokens,
            loss_mask=b"\1" * length,
            reward=1.0,
        )
        episode = Episode(episode_id=one.episode_id, rollout_ids=(one.rollout_id,), trajectory=trajectory)
        await store.trajectories.complete(lease, episode, trusted=True)


async def measure(length: int) -> dict[str, float]:
    """Bytes per token of the responses, and per rollout where it has none."""
    with EmbeddedRedis() as server:
        link = StoreConnection(server.url)
        await link.open()
        store = Store(link, "term")
        await store.runs.take_over()
        spec = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"), quota_bytes=8 << 30)
        await store.runs.submit(RUN, spec)
        lease = await store.leases.claim(RUN, "trainer", "here", 3600)
        empty = used(server)
        requests = [request(number, length) for number in range(ROLLOUTS)]
        await store.rollouts.submit(lease, requests, quota_bytes=spec.quota_bytes, max_open=ROLLOUTS)
        queued, journal = used(server), server.journal.stat().st_size
        await generate(store, requests, length)
        generated, appended = used(server), server.journal.stat().st_size
        await complete(store, lease, requests, length)
        completed = used(server)
        counted, *_ = await store.runs.waiting(RUN)
        await link.close()
    all_tokens = ROLLOUTS * length
    return {
        "tokens_per_response": length,
        "queued_bytes_per_rollout": round((queued - empty) / ROLLOUTS),
        "stored_bytes_per_token": round((generated - queued) / all_tokens, 1),
        "journal_bytes_per_token": round((appended - journal) / all_tokens, 1),
        "waiting_bytes_per_token": round((completed - empty) / all_tokens, 1),
        "quota_bytes_per_token_waiting": round(counted / all_tokens, 1),
    }


if __name__ == "__main__":
    for length in (256, 1000, 4000, 16000):
        print(json.dumps(asyncio.run(measure(length))), flush=True)
