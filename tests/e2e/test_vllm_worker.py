"""Workers with real engines in a real cluster: a response handed from one to the other is the response of one
alone."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ebbtide.client import Lease
from ebbtide.types.rollout import FinishedRollout, RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens
from tests.chaos.cluster import Cluster
from tests.engine_config import engine_config
from tests.support.waiting import wait_until

RUN = "r"
LENGTH = 400
WINDOW = 32
PROMPTS = [[20 + i, 21, 22, 23 + i] for i in range(8)]
SAMPLING = Sampling(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)

pytestmark = pytest.mark.timeout(300)


def request(name: str, number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"{name}{number}",
        group_id=f"{name}{number}",
        episode_id=f"{name}{number}",
        prompt_ids=pack_ids(PROMPTS[number]),
        sampling=SAMPLING,
    )


async def finishes(lease: Lease, count: int) -> dict[str, FinishedRollout]:
    found: dict[str, FinishedRollout] = {}
    async for finish in lease.finished():
        found[finish.rollout_id] = finish
        if len(found) == count:
            break
    return found


async def test_a_response_handed_over_at_sigterm_is_that_of_one_engine(
    cluster: Cluster, make_checkpoint: Callable[..., Path]
) -> None:
    base, trained = make_checkpoint(1), make_checkpoint(2)
    config = cluster.directory / "worker.toml"
    config.write_text(engine_config())
    flags: dict[str, Any] = {"engine": "vllm", "model": base, "config": config}
    client = await cluster.boot(workers=0)
    await asyncio.gather(cluster.worker("w1", **flags), cluster.worker("w2", **flags))
    await client.submit({"name": "e2e", "model": str(base), "environment": {"name": "none"}}, RUN)
    lease = await client.acquire(RUN, holder="test")
    await lease.publish(load_file(trained / "model.safetensors"), step=0)
    await lease.submit_rollouts([request("cut", number) for number in range(8)])

    def begun() -> bool:
        records = cluster.ledger()
        return len(records) == 8 and all(record.generated >= 16 for record in records)

    await wait_until(begun, timeout=60)
    leaver = "w1" if cluster.ledger("w1") else "w2"
    await cluster.process[leaver].stop()
    assert cluster.process[leaver].returncode == 0
    await lease.submit_rollouts([request("whole", number) for number in range(8)])
    found = await asyncio.wait_for(finishes(lease, 16), 120)

    made: dict[str, int] = defaultdict(int)
    for record in cluster.ledger():
        made[record.rollout_id] += record.generated
    assert set(made.values()) == {LENGTH}, "every token was generated once"
    assert any(record.start > 0 for record in cluster.ledger())
    for number in range(8):
        cut, whole = (unpack_tokens(found[f"{name}{number}"].tokens) for name in ("cut", "whole"))
        assert cut["id"].tolist() == whole["id"].tolist()
        assert cut["logprob"].tolist() == pytest.approx(whole["logprob"].tolist(), abs=1e-3)
        assert set(cut["version"].tolist()) == {1}
    await lease.release()


async def test_a_response_that_fills_a_short_context_ends_as_on_an_engine_with_a_longer_one(
    cluster: Cluster, make_checkpoint: Callable[..., Path]
) -> None:
    base = make_checkpoint(1)
    flags: dict[str, dict[str, Any]] = {}
    for name, context in (("w1", LENGTH // 2), ("w2", 0)):
        config = cluster.directory / f"{name}.toml"
        config.write_text(engine_config(context))
        flags[name] = {"engine": "vllm", "model": base, "config": config, "slots": 4}
    client = await cluster.boot(workers=0)
    await asyncio.gather(*(cluster.worker(name, **settings) for name, settings in flags.items()))
    await client.submit({"name": "e2e", "model": str(base), "environment": {"name": "none"}}, RUN)
    lease = await client.acquire(RUN, holder="test")
    await lease.publish(load_file(base / "model.safetensors"), step=0)
    await lease.submit_rollouts([request("mixed", number) for number in range(8)])
    await asyncio.wait_for(finishes(lease, 8), 120)
    assert any(record.generated == LENGTH // 2 - len(PROMPTS[0]) for record in cluster.ledger("w1"))
    await cluster.process["w1"].stop()
    await lease.submit_rollouts([request("alone", number) for number in range(8)])
    found = await asyncio.wait_for(finishes(lease, 16), 120)
    for number in range(8):
        mixed, alone = (found[f"{name}{number}"] for name in ("mixed", "alone"))
        assert unpack_tokens(mixed.tokens)["id"].tolist() == unpack_tokens(alone.tokens)["id"].tolist()
        assert len(unpack_tokens(mixed.tokens)) == LENGTH


async def test_a_killed_worker_regenerates_at_most_a_flush_window_of_each_response(
    cluster: Cluster, make_checkpoint: Callable[..., Path]
) -> None:
    """Also while its engine delivers tokens several together: what it holds back counts to the window."""
    base = make_checkpoint(1)
    config = cluster.directory / "worker.toml"
    config.write_text(engine_config() + "stream_interval = 8\n")
    flags: dict[str, Any] = {"engine": "vllm", "model": base, "config": config, "flush_tokens": WINDOW}
    client = await cluster.boot(workers=0)
    await asyncio.gather(cluster.worker("w1", **flags), cluster.worker("w2", **flags))
    await client.submit({"name": "e2e", "model": str(base), "environment": {"name": "none"}}, RUN)
    lease = await client.acquire(RUN, holder="test")
    await lease.publish(load_file(base / "model.safetensors"), step=0)
    await lease.submit_rollouts([request("cut", number) for number in range(8)])

    def begun() -> bool:
        records = cluster.ledger()
        return len(records) == 8 and all(record.generated >= 2 * WINDOW for record in records)

    await wait_until(begun, timeout=60)
    killed = "w1" if cluster.ledger("w1") else "w2"
    cluster.kill(killed)
    found = await asyncio.wait_for(finishes(lease, 8), 120)
    made, resumed = {record.rollout_id: record for record in cluster.ledger(killed)}, 0
    for record in cluster.ledger():
        if record.start > 0 and (cut := made.get(record.rollout_id)) is not None and cut is not record:
            resumed += 1
            assert cut.start + cut.generated - record.start <= WINDOW
    assert resumed, "the killed worker had responses under way"
    assert all(len(unpack_tokens(finish.tokens)) == LENGTH for finish in found.values())
    await lease.release()
