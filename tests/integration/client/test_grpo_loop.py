"""The PyTorch loop of examples/, on one rank and on two with FSDP2, against real services and a scripted engine."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import AlreadyExists, LeaseSuperseded
from ebbtide.free_ports import free_port
from ebbtide.types.run import RunStatus
from ebbtide.weights import as_array
from tests.fakes.scripted_settings import ScriptedSettings
from tests.fakes.service_process import TOKEN
from tests.integration.client.test_real_services import SPEC, Cluster
from tests.support.waiting import wait_until

SCRIPT = str(Path(__file__).with_name("rewarded_loop.py"))
STEPS, GROUPS, SAMPLES = 2, 2, 4
SIZES = ["--steps", str(STEPS), "--groups", str(GROUPS), "--samples", str(SAMPLES), "--learning-rate", "1e-2"]


@pytest.fixture
async def cluster(tmp_path: Path, redis_url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, redis_url, script=ScriptedSettings(vocab_size=96, step_s=0.002))
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    security = ClientSecurity(token=TOKEN)
    async with Client(cluster.coordinator.address, cluster.relay.address, security=security, patience_s=20.0) as client:
        yield client


async def run(cluster: Cluster, *command: str) -> str:
    addresses = {"EBBTIDE_COORDINATOR": cluster.coordinator.address, "EBBTIDE_RELAY": cluster.relay.address}
    environment = {**os.environ, **addresses, "EBBTIDE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_two_ranks_with_fsdp2_publish_the_weights_that_one_rank_does_and_all_rollouts_are_trained(
    client: Client, cluster: Cluster, tiny_model: Path
) -> None:
    arguments = [SCRIPT, "--model", str(tiny_model), *SIZES]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    for run_id, launch in (("one", []), ("two", ranks)):
        out = await run(cluster, *launch, *arguments, "--run-id", run_id)
        total = STEPS * GROUPS * SAMPLES
        assert f"{run_id}: {total} of {total} rollouts trained" in out
        ended = await client.run(run_id)
        assert (ended.status, ended.newest.step if ended.newest else 0) == (RunStatus.FINISHED, STEPS)
    _, one = await client.fetch_weights("one")
    _, two = await client.fetch_weights("two")
    began = load_file(tiny_model / "model.safetensors")
    assert one.keys() == two.keys() == began.keys()
    for name, tensor in one.items():
        np.testing.assert_allclose(as_array(two[name]), as_array(tensor), atol=2e-4, err_msg=name)
    assert any(np.abs(as_array(one[name]) - tensor).max() > 1e-3 for name, tensor in began.items())


async def test_a_trainer_that_asks_again_for_a_step_gets_the_same_responses_until_it_acknowledged_them(
    client: Client, cluster: Cluster
) -> None:
    await client.submit({**SPEC, "trainer": {"name": "external"}}, "again")
    prompts = [[5, 6, 7], [8, 9]]
    async with client.claim("again") as lease:
        version = await lease.publish({"w": np.ones(4, np.float32)}, step=0)
        first = await lease.generate(prompts, samples=2, step=0, version=version)
    assert [[one.rollout_id for one in group] for group in first] == [["s0.g0.0", "s0.g0.1"], ["s0.g1.0", "s0.g1.1"]]
    async with client.claim("again") as lease:
        assert [
            [one.tokens for one in group] for group in await lease.generate(prompts, samples=2, step=0, version=version)
        ] == [[one.tokens for one in group] for group in first]
        with pytest.raises(AlreadyExists):
            await lease.generate([[1, 2], [3, 4]], samples=2, step=0, version=version)
        await lease.acknowledge(one.rollout_id for group in first for one in group)
        with pytest.raises(AlreadyExists, match="responses of step 0 were acknowledged"):
            await lease.generate(prompts, samples=2, step=0, version=version)
        ended = await lease.finish()
    assert ended.counters["trained"] == ended.counters["submitted"] == 4


async def test_a_trainer_that_waits_for_responses_is_told_that_its_run_has_ended(client: Client) -> None:
    async def submitted() -> bool:
        return bool((await client.run("cancelled")).counters.get("submitted"))

    await client.submit({**SPEC, "trainer": {"name": "external"}}, "cancelled")
    async with client.claim("cancelled") as lease:
        version = await lease.publish({"w": np.ones(4, np.float32)}, step=0)
        never = replace(version, version=version.version + 1)
        waiting = asyncio.create_task(lease.generate([[5, 6, 7]], samples=2, step=0, version=never))
        await wait_until(submitted)
        await client.cancel("cancelled")
        with pytest.raises(LeaseSuperseded):
            await asyncio.wait_for(waiting, 20)
