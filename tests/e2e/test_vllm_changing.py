"""A worker's engine that is restarted for another architecture is what a fresh one would be, and finds back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ebbtide.client import Client, Lease
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.types.rollout import FinishedRollout
from ebbtide.types.tokens import unpack_tokens
from tests.chaos.cluster import Cluster
from tests.e2e.changed_facts import VERSION
from tests.e2e.facts import Facts, facts_of
from tests.e2e.test_vllm_install import EXACT, same
from tests.e2e.test_vllm_worker import finishes, request
from tests.engine_config import engine_config

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return make_checkpoint(1), make_checkpoint(2, hidden_size=160, layers=3)


@pytest.fixture(scope="module")
def changed(checkpoints: tuple[Path, Path]) -> Facts:
    if not cpu_build.is_cpu_build():
        pytest.skip("these are a CPU build's facts")
    return facts_of("changed_facts", *checkpoints, within_s=600)


@pytest.fixture(scope="module")
def fresh(changed: Facts, checkpoints: tuple[Path, Path]) -> Facts:
    return facts_of("changed_facts", checkpoints[1], within_s=250)


def test_a_changed_engine_equals_a_fresh_one_of_that_architecture(changed: Facts, fresh: Facts) -> None:
    assert same(changed["after"]["single"], fresh["after"]["single"], EXACT)
    for one, other in zip(changed["after"]["batch"], fresh["after"]["batch"], strict=True):
        assert same(one, other, EXACT)
    assert set(changed["after"]["single"]["versions"]) == {VERSION}
    assert changed["after"]["single"]["ids"] != changed["before"]["single"]["ids"]


def test_the_worker_goes_on_while_its_engine_is_started_anew(changed: Facts) -> None:
    assert changed["change_s"] > 1.0
    assert max(changed["stood_still_s"], changed["stood_still_again_s"]) < 2.5, "it would be taken for lost"
    first, second = changed["infos"]
    assert first["architecture"] != second["architecture"]
    assert second["model"] == "another"


def test_one_engine_at_a_time_and_none_behind_the_last(changed: Facts) -> None:
    assert (changed["processes"], changed["left"]) == (1, 0)


def test_a_model_that_does_not_start_leaves_the_engine_that_there_was(changed: Facts) -> None:
    assert "NoSuchModel" in changed["refusal"]
    assert changed["back"] == changed["infos"][0]
    assert same(changed["again"]["single"], changed["before"]["single"], EXACT)


async def generated(client: Client, run_id: str, checkpoint: Path, name: str) -> tuple[Lease, list[FinishedRollout]]:
    """Four responses of a run of that checkpoint's architecture and weights."""
    await client.submit({"name": "e2e", "model": str(checkpoint), "environment": {"name": "none"}}, run_id)
    lease = await client.acquire(run_id, holder=run_id)
    await lease.publish(load_file(checkpoint / "model.safetensors"), step=0)
    await lease.submit_rollouts([request(name, number) for number in range(4)])
    found = await asyncio.wait_for(finishes(lease, 4), 240)
    return lease, [found[name] for name in sorted(found)]


@pytest.mark.nightly  # tests/chaos/test_changing.py has workers with scripted engines change
async def test_a_worker_that_changed_generates_what_one_does_that_began_with_that_model(
    cluster: Cluster, checkpoints: tuple[Path, Path]
) -> None:
    first, second = checkpoints
    config = cluster.directory / "worker.toml"
    config.write_text(engine_config())
    mirrors = cluster.directory / "mirrors"
    flags: dict[str, Any] = {"engine": "vllm", "config": config, "mirror_dir": mirrors, "boot_s": 180.0}
    client = await cluster.boot(workers=0, heartbeat_timeout_s=60.0)
    await cluster.worker("w1", model=first, **flags)
    await generated(client, "first", first, "own")
    await client.cancel("first")
    _, changed = await generated(client, "second", second, "changed")
    await client.cancel("second")
    assert len(cluster.logged("w1", "engine changed")) == 1
    await cluster.process["w1"].stop()
    assert cluster.process["w1"].returncode == 0
    await cluster.worker("w2", model=second, **flags)
    _, fresh = await generated(client, "third", second, "fresh")
    for one, other in zip(changed, fresh, strict=True):
        mine, its = unpack_tokens(one.tokens), unpack_tokens(other.tokens)
        assert mine["id"].tolist() == its["id"].tolist()
        assert mine["logprob"].tolist() == pytest.approx(its["logprob"].tolist(), abs=1e-3)
