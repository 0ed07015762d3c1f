"""Whoever has to do with a version dies when half of it has passed: real engines go on with the whole old version, then
serve the whole new one, as an engine does that was booted from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

import pytest
import pytest_asyncio

from tests.chaos.cluster import Cluster
from tests.e2e.killed_fleet import CLOSE, Fleet, stopped
from tests.e2e.killed_versions import PROMPTS, fresh, make_policy

#: Tokens of a response that is cut.
LONG: Final = 200

#: The tests share one cluster. The trainer's comes first: what the relay has of other runs is not sent to it again.
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The cluster, and what fresh engines say with either version. No worker has booted yet."""
    folder = tmp_path_factory.mktemp("killed")
    policy = await asyncio.to_thread(make_policy, folder)
    first, second = await asyncio.gather(fresh(policy.first), fresh(policy.second))
    assert first.ids != second.ids
    assert first.gap(second) > 100 * CLOSE
    cluster = Cluster(folder)
    fleet = Fleet(cluster, policy, {policy.first: first, policy.second: second})
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        await fleet.boot()
        stack.push_async_callback(fleet.close)
        yield fleet


async def test_a_trainer_that_dies_amid_a_publish_leaves_the_old_version_serving(fleet: Fleet) -> None:
    await fleet.have("w1")
    async with fleet.run("trainer") as run:
        await run.begin("w1")
        way = fleet.cluster.ways["trainer", "relay"].forth
        fleet.cut(way)
        fleet.trainer.send(run.run_id, fleet.policy.second)
        await stopped(way)
        await run.says(1, fleet.policy.first)
        await fleet.again()
        way.release()
        assert await run.held() == [1]
        await run.says(1, fleet.policy.first)
        number = (await run.publish(fleet.policy.second))["version"]["version"]
        await run.says(number, fleet.policy.second)
        assert run.installed("w1")[-1] == number


async def test_a_relay_that_dies_amid_a_fetch_is_fetched_from_again(fleet: Fleet) -> None:
    await fleet.have("w1")
    async with fleet.run("relay") as run:
        await run.begin("w1")
        way = fleet.back("w1", "relay")
        fleet.cut(way)
        await run.publish(fleet.policy.second)
        await stopped(way)
        fleet.cluster.kill("relay")
        await run.says(1, fleet.policy.first)
        way.release()
        await fleet.cluster.relay()
        await run.says(2, fleet.policy.second)


async def test_a_peer_that_dies_amid_a_fetch_is_replaced(fleet: Fleet) -> None:
    await fleet.have("w1", "w2")
    async with fleet.run("peer") as run:
        await run.begin("w1", "w2")
        way, relay = fleet.back("readers", "w1"), fleet.back("w2", "relay")
        news = fleet.back("w2", "coordinator")
        news.hold()  # w2 hears of the version when w1 has it: so it reads from w1
        fleet.cut(way)
        await run.publish(fleet.policy.second)
        await run.has("w1", 2)
        news.release()
        await stopped(way)
        relay.hold()  # nor does w2 get it elsewhere while the old version is asked for
        await run.says(1, fleet.policy.first)
        assert 2 not in run.installed("w2")
        fleet.kill("w1")
        relay.release()
        way.release()
        await run.says(2, fleet.policy.second)
        assert run.installed("w2")[-1] == 2


async def test_a_worker_that_dies_amid_a_fetch_comes_back_to_the_whole_version(fleet: Fleet) -> None:
    if "w1" in fleet.living:
        fleet.kill("w1")  # it would serve the version meanwhile
    await fleet.have("w2")
    async with fleet.run("worker") as run:
        await run.begin("w2")
        lengths = [LONG] * len(PROMPTS)
        whole = await run.ended(await run.submit(PROMPTS, lengths, version=1))
        way = fleet.back("w2", "relay")
        fleet.cut(way)
        await run.publish(fleet.policy.second)
        await stopped(way)
        await run.says(1, fleet.policy.first)
        cut = await run.submit(PROMPTS, lengths)
        await run.begun(cut)
        assert 2 not in run.installed("w2")
        fleet.kill("w2")
        way.release()
        await fleet.have("w2")
        await run.says(2, fleet.policy.second)
        await run.are_cut(cut, whole)
