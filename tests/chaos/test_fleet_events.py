"""Much of the fleet comes or goes at once, or somebody always does: no rollout is lost, nor tried without end."""

import asyncio
from random import Random

import pytest

from ebbtide.types.run import RunStatus
from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin
from tests.support.waiting import wait_until


async def test_half_of_the_fleet_may_go_at_once(cluster: Cluster, begin: Begin) -> None:
    load = await begin(workers=4)
    await load.submit(128)
    load.watch_tokens(8)
    await load.more_tokens(128 * 12)
    cluster.kill("w1", "w2")
    cut = load.in_flight("w1", "w2")
    run = await load.settle()
    assert 32 <= cut <= load.interruptions() <= 64
    load.check_losses()
    assert run.counters["attempts"] <= 2 * 128


async def test_a_run_without_workers_says_so_and_goes_on_with_the_first_that_has_its_weights(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin()
    await load.submit(40)
    await load.more_tokens(400)
    cluster.kill("w1", "w2")

    async def all_wait() -> bool:
        run = await load.run()
        return run.counters["queued"] == 40 - run.counters.get("finished", 0) and "waits for workers" in run.message

    await wait_until(all_wait, timeout=20, what="all rollouts back in line, and a word of it")
    await load.publish(step=1)
    await load.submit(8, version=2)
    run = await load.run()
    assert (run.status, run.counters["queued"]) == (RunStatus.RUNNING, 48 - run.counters.get("finished", 0))
    await cluster.worker("w3", slots=64)

    async def goes_on() -> bool:
        return "waits" not in (await load.run()).message

    await wait_until(goes_on, timeout=20, what="no more word of waiting")
    await load.settle()
    assert {span.first_version for span in await load.spans() if span.worker_id == "w3"} == {2}
    assert len(load.resumed(least=4)) >= 16
    load.check_losses()


async def check_churn(cluster: Cluster, begin: Begin, *, changes: int) -> None:
    """Every second or so one worker leaves, asked to or killed, and one joins."""
    load, random = await begin(workers=3), Random(changes)
    living = ["w1", "w2", "w3"]
    busy = asyncio.create_task(load.keep_open(80))
    for number in range(4, 4 + changes):
        await load.more_tokens(random.randrange(400, 1600))
        living.remove(victim := random.choice(living))
        if random.random() < 0.5:
            cluster.kill(victim)
        else:
            cluster.ask_to_end(victim)
        await cluster.worker(f"w{number}")
        living.append(f"w{number}")
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    run = await load.settle()
    load.check_losses()
    assert load.resumed(least=8)
    assert run.counters["attempts"] <= 2 * len(load.requests)


async def test_joins_and_leaves_all_the_time_end_no_rollout_and_retry_few(cluster: Cluster, begin: Begin) -> None:
    await check_churn(cluster, begin, changes=5)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_fifty_joins_and_leaves_end_no_rollout_and_retry_few(cluster: Cluster, begin: Begin) -> None:
    await check_churn(cluster, begin, changes=50)
