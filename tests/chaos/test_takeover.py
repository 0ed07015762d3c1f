"""The coordinator that leads is killed or frozen again and again: the other takes over, and workers keep their work."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from benchmarks.takeover import PROMISED_S, measure
from tests.chaos.cluster import Cluster
from tests.chaos.load import Load
from tests.support.waiting import wait_until


@pytest.mark.parametrize("violence", ["kill", "freeze"])
async def test_live_attempts_go_on_at_the_coordinator_that_takes_over(cluster: Cluster, violence: str) -> None:
    load, random = await Load.begin(cluster, await cluster.boot_pair()), Random(3)
    feeding = asyncio.create_task(load.keep_open(96))
    try:
        for _ in range(2):
            await load.more_tokens(random.randrange(100, 600))
            leader = cluster.leader()
            await (killed if violence == "kill" else frozen)(cluster, leader)
            await cluster.coordinator(leader)
            await load.more_tokens(100)
        await stopped(feeding)
        run = await load.settle()
        assert run.counters["attempts"] <= len(load.requests) + 32  # what was on its way was given out again
        assert (load.interruptions(), load.generated_twice()) == (0, 0)
    finally:
        await stopped(feeding)
        await load.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_twenty_kills_and_twenty_freezes_are_over_within_the_time_promised(tmp_path: Path) -> None:
    told = await measure(tmp_path, 20)
    assert told["all"]["took_p99_s"] <= PROMISED_S
    assert (told["tokens_lost"], told["tokens_generated_twice"], told["attempts_owned_twice"]) == (0, 0, 0)


async def killed(cluster: Cluster, leader: str) -> None:
    cluster.kill(leader)
    await succeeded(cluster, leader)


async def frozen(cluster: Cluster, leader: str) -> None:
    """It wakes when the other leads, may write nothing, and ends."""
    cluster.freeze(leader)
    await succeeded(cluster, leader)
    cluster.thaw(leader)
    await wait_until(lambda: not cluster.process[leader].running(), timeout=20, what="its end")


async def succeeded(cluster: Cluster, leader: str) -> None:
    await wait_until(lambda: cluster.leader() not in {"", leader}, timeout=20, what="another leader")


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_knows_the_new_leader_before_its_first_rollout(cluster: Cluster) -> None:
    """One that starts while nobody leads, and one whose first address is that of who stands by."""
    client = await cluster.boot_pair(workers=0)
    cluster.kill(cluster.leader())
    await cluster.worker("w1")
    await cluster.worker("w2", *reversed(cluster.heads))
    load = await Load.begin(cluster, client)
    try:
        await load.submit(32)
        await load.settle()
    finally:
        await load.close()
