"""Runs of several architectures on workers that serve one at a time: engines are restarted where that pays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ebbtide.client import Client, Lease
from ebbtide.rollout_worker.engine.checkpoint_facts import header
from ebbtide.types.fleet import Worker
from ebbtide.types.run import RunStatus
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import FileLayout, build_manifest, named_tensor
from tests.chaos.cluster import SCRIPT, Cluster
from tests.chaos.load import SPEC, make_requests
from tests.support.waiting import wait_until

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

pytestmark = pytest.mark.timeout(180)


def checkpoint(folder: Path, elements: int) -> Path:
    """A checkpoint of one tensor, as far as a scripted engine looks at one."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": elements}))
    tensor = named_tensor("w", np.zeros(elements, np.float32))
    layout = FileLayout(build_manifest("r", PolicyVersion(policy="policy", version=1), [tensor]))
    (folder / "model.safetensors").write_bytes(layout.header.ljust(layout.size, b"\0"))
    assert header(folder / "model.safetensors")["w"]["shape"] == [elements]
    return folder


async def begin(client: Client, run_id: str, model: Path, elements: int, *, rollouts: int) -> Lease:
    await client.submit(SPEC | {"model": str(model), "trainer": {"name": "external"}}, run_id)
    lease = await client.acquire(run_id, holder=run_id)
    await lease.publish({"w": np.arange(elements, dtype=np.float32)}, step=0)
    await lease.submit_rollouts(make_requests(0, rollouts))
    return lease


async def boot(cluster: Cluster, own: Path, **worker: Any) -> Client:
    cluster.script = replace(SCRIPT, model=str(own), boot_s=0.5, step_s=0.01)
    cluster.worker_settings = worker
    return await cluster.boot(workers=1, timeslice_s=1.0)


async def finished(client: Client, run_id: str, count: int) -> None:
    async def done() -> bool:
        return (await client.run(run_id)).counters.get("finished", 0) >= count

    await wait_until(done, 60.0, what=f"{count} rollouts of {run_id}")


async def only_worker(client: Client) -> Worker:
    (worker,) = await client.workers()
    return worker


async def test_one_worker_serves_two_architectures_in_turns(cluster: Cluster, tmp_path: Path) -> None:
    small, large = checkpoint(tmp_path / "small", 16), checkpoint(tmp_path / "large", 64)
    client = await boot(cluster, small)
    first = await begin(client, "first", small, 16, rollouts=24)
    await finished(client, "first", 4)
    own = (await only_worker(client)).engine
    second = await begin(client, "second", large, 64, rollouts=24)
    await finished(client, "second", 24)
    await finished(client, "first", 24)
    worker = await only_worker(client)
    assert own is not None
    assert own.model == "small"
    assert worker.engine is not None
    assert cluster.logged("w1", "engine changed"), "it was never started again"
    assert not cluster.logged("coordinator", "lost")
    assert not cluster.logged("coordinator", "suspected")
    assert (await client.run("second")).counters.get("tokens_lost_at_most", 0) == 0
    await begin(client, "third", large, 64, rollouts=4)
    await client.cancel("first")
    await client.cancel("second")
    await finished(client, "third", 4)
    assert (await only_worker(client)).engine != own
    for lease in (first, second):
        await lease.release()


async def test_a_worker_that_may_not_change_refuses_a_run_of_another_architecture(
    cluster: Cluster, tmp_path: Path
) -> None:
    small, large = checkpoint(tmp_path / "small", 16), checkpoint(tmp_path / "large", 64)
    client = await boot(cluster, small, no_change_architecture=True)
    lease = await begin(client, "other", large, 64, rollouts=4)
    await ended(client, "other")
    assert "another architecture" in (await client.run("other")).message
    assert not cluster.logged("w1", "engine changed")
    await lease.release()


async def test_a_run_whose_model_no_engine_may_be_started_for_fails_and_the_worker_serves_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    small, large = checkpoint(tmp_path / "small", 16), checkpoint(tmp_path / "large", 1 << 19)
    client = await boot(cluster, small, change_max_mib=1)
    lease = await begin(client, "other", large, 1 << 19, rollouts=4)
    await ended(client, "other")
    events = [event.message async for event in client.watch("other")]
    assert any("change_max_mib" in message for message in events)
    await lease.release()
    await begin(client, "own", small, 16, rollouts=4)
    await finished(client, "own", 4)


async def ended(client: Client, run_id: str) -> None:
    async def failed() -> bool:
        return (await client.run(run_id)).status is RunStatus.FAILED

    await wait_until(failed, 60.0, what=f"the end of {run_id}")
