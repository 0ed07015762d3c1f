"""The key that a run's weights are signed with: told to its trainer alone, and the same in every life of everything."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from ebbtide.errors import InvalidRequest, LeaseSuperseded
from ebbtide.store.scripts import PUBLISHERS
from ebbtide.v1 import runs_pb2, types_pb2
from ebbtide.weights.manifest import Signer
from tests.fakes.scripted_worker import ScriptedWorker
from tests.integration.coordinator.conftest import Cluster, ScriptedRun, take
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        yield redis


@pytest.fixture
async def own(store: EmbeddedRedis, cluster_with: Any) -> AsyncIterator[Cluster]:
    async with cluster_with(store.url) as cluster:
        yield cluster


async def seed(run: ScriptedRun) -> bytes:
    reserved = await run.cluster.call(run.cluster.runs.ReserveVersion, run.lease)
    found: bytes = reserved.publisher_seed
    return found


async def told(worker: ScriptedWorker, count: int = 1) -> bytes:
    """The key of the worker's newest install."""
    await wait_until(lambda: len(worker.publishers) >= count, what="an install")
    return worker.publishers[-1]


async def test_the_trainer_gets_the_seed_of_the_key_that_workers_are_told(cluster: Cluster) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    assert await told(worker) == Signer(await seed(run)).public
    assert await seed(run) == await seed(run)


async def test_each_run_has_a_key_of_its_own(cluster: Cluster) -> None:
    one, other = await cluster.run("one"), await cluster.run("other")
    assert await seed(one) != await seed(other)


async def test_only_the_holder_of_the_trainer_lease_is_told_the_seed(cluster: Cluster) -> None:
    run = await cluster.run()
    trainer = run.lease
    driver = await run.claim("driver", "driver")
    with pytest.raises(InvalidRequest):
        await cluster.call(cluster.runs.ReserveVersion, driver)
    run.lease = trainer
    await run.claim("host")  # the same holder again: the former fence is old
    with pytest.raises(LeaseSuperseded):
        await cluster.call(cluster.runs.ReserveVersion, trainer)


async def test_nobody_is_told_the_seed_by_what_is_said_of_the_run(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    run = await cluster.run()
    secret = await seed(run)
    said: list[Message] = [await run.get(), await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())]
    said += await take(cluster.runs.WatchRun(runs_pb2.WatchRunRequest(run_id="r")), 3)
    worker = await cluster.worker("w1")
    await told(worker)
    assert not [message for message in said if secret in message.SerializeToString()]
    out = "".join(capfd.readouterr())
    assert not [form for form in (repr(secret)[2:-1], secret.hex()) if form in out]


async def test_the_key_stays_over_restarts_of_coordinator_and_store(own: Cluster, store: EmbeddedRedis) -> None:
    run = await own.run()
    before = await seed(run)
    await own.restart()
    assert await told(await own.worker("w1")) == Signer(before).public
    store.kill()
    store.start()
    await own.restart()
    await run.claim()
    assert await seed(run) == before
    worker = await own.worker("w1")
    assert await told(worker) == Signer(before).public
    await worker.break_streams()
    assert await told(await own.worker("w1")) == Signer(before).public


async def test_a_run_that_the_store_forgot_has_its_key_again_when_it_is_submitted_again(
    own: Cluster, store: EmbeddedRedis
) -> None:
    run = await own.run()
    before = await seed(run)
    store.come_back(knowing=0)
    await wait_until(lambda: not own.coordinator.state.runs, what="the coordinator noticing")
    assert await seed(await own.run()) == before
    await own.restart()  # and it is the store's again, not only this coordinator's
    await run.claim()
    assert await seed(run) == before


async def test_a_superseded_coordinator_and_the_one_in_its_place_have_one_key(
    own: Cluster, cluster_with: Any, store: EmbeddedRedis
) -> None:
    run = await own.run()
    before = await seed(run)
    async with cluster_with(store.url) as newer:
        run.cluster = newer
        await run.claim()
        assert await seed(run) == before


async def test_a_run_from_before_there_were_keys_gets_one(own: Cluster, store: EmbeddedRedis) -> None:
    run = await own.run()
    store.command("DEL", PUBLISHERS)
    await own.restart()
    await run.claim()
    worker = await own.worker("w1")
    assert await told(worker) == Signer(await seed(run)).public
    version = types_pb2.PolicyVersion(policy="policy", version=1, step=0, root=b"\1" * 32)
    assert (await run.get()).newest == version
