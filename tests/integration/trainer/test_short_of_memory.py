"""What one rank cannot do fails the run: the others do not wait for it, and none is started again to do the same."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import Client
from ebbtide.free_ports import free_port
from ebbtide.types.run import RunSpec, RunStatus
from tests.integration.trainer.conftest import Cluster
from tests.integration.trainer.test_runs import ended
from tests.support.redis_servers import EmbeddedRedis


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, tiny_model: Path
) -> Iterator[Cluster]:
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    script = str(Path(__file__).with_name("short_of_memory.py"))
    runner = (*torchrun, "--master-port", str(free_port()), script)
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), redis_server.url, ("--rank-timeout-s", "30"), runner)
    try:
        cluster.start(tiny_model)
        yield cluster
    finally:
        cluster.close()


@pytest.mark.timeout(200)
async def test_a_run_whose_files_one_rank_lacks_fails_with_that_ranks_words(
    client: Client, make_spec: Callable[..., RunSpec]
) -> None:
    run, _ = await ended(client, (await client.submit(make_spec())).run_id)
    assert run.status is RunStatus.FAILED
    assert run.message.endswith("is gone here")


@pytest.mark.timeout(200)
async def test_the_run_fails_with_the_settings_that_decide_on_memory_and_the_ranks_end(
    cluster: Any, client: Client, make_spec: Callable[..., RunSpec]
) -> None:
    run, events = await ended(client, (await client.submit(make_spec(trainer={"kl_coefficient": 0.5}))).run_id)
    assert run.status is RunStatus.FAILED
    assert run.message.startswith("rank 1: step 3 ran out of memory on cpu: lower trainer.micro_batch_tokens (16384)")
    assert "set offload of the trainer" in run.message
    assert "Tried to allocate 5.00 GiB" in run.message
    assert len([event for event in events if event.kind == "step"]) == 2
    assert await asyncio.to_thread(cluster.programs["trainer"].process.wait, 60) != 0
