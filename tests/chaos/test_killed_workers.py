"""Workers die at any byte: their rollouts go on elsewhere from the last stored token, and none is lost."""

import asyncio
from random import Random

from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin


async def test_rollouts_of_a_killed_worker_go_on_elsewhere_from_their_stored_tokens(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin()
    await load.submit(64)
    load.watch_tokens(6)
    await load.more_tokens(64 * 24)
    cluster.kill("w1")
    cut = load.in_flight("w1")
    assert cut >= 16
    await cluster.worker("w3")
    run = await load.settle()
    assert cut <= load.interruptions() <= 32
    assert len(load.resumed(least=8)) >= 16
    load.check_losses()
    assert run.counters["attempts"] == 64 + load.interruptions()
    assert run.counters["tokens_resumed"] == sum(record.start for record in load.resumed())


async def test_any_number_of_kills_loses_nothing(cluster: Cluster, begin: Begin) -> None:
    load, random = await begin(workers=3), Random(1)
    await load.submit(320)
    living = ["w1", "w2", "w3"]
    for number in range(4, 8):
        await load.more_tokens(random.randrange(100, 800))
        living.remove(victim := random.choice(living))
        cluster.kill(victim)
        await cluster.worker(f"w{number}")
        living.append(f"w{number}")
    await load.settle()
    assert load.resumed(least=8)
    load.check_losses()


async def test_workers_and_coordinator_killed_in_one_moment_lose_only_what_was_not_stored(
    cluster: Cluster, begin: Begin
) -> None:
    load = await begin(recover_grace_s=0.5)
    await load.submit(48)
    await load.more_tokens(48 * 16)
    cluster.kill("w1", "coordinator", "w2")
    await cluster.coordinator(recover_grace_s=0.5)
    await asyncio.gather(cluster.worker("w3"), cluster.worker("w4"))
    await load.settle()
    assert load.resumed(least=8)
    load.check_losses()
