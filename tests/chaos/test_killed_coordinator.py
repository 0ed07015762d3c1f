"""The coordinator dies and comes back where it was: workers keep their attempts, and nobody notices."""

from random import Random

from ebbtide.store.scripts import run_key
from tests.chaos.cluster import FLUSH_TOKENS, Cluster
from tests.chaos.load import RUN, Begin
from tests.chaos.test_killed_store import quiet
from tests.support.waiting import wait_until


async def test_live_attempts_go_on_over_any_number_of_coordinators(cluster: Cluster, begin: Begin) -> None:
    load, random = await begin(), Random(2)
    await load.submit(160)
    load.watch_tokens(6)
    for _ in range(3):
        await load.more_tokens(random.randrange(100, 1000))
        cluster.kill("coordinator")
        await cluster.coordinator()
    run = await load.settle()
    assert run.counters["attempts"] <= 160 + 16  # what was on its way to a worker when it died was given out again
    assert (load.interruptions(), load.generated_twice()) == (0, 0)
    adopted = [entry["adopted"] for entry in cluster.logged("coordinator", "attached")]
    assert sum(adopted) >= 64


async def test_workers_fill_their_window_and_users_wait_while_it_is_away(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    # What is still on its way to a worker when the coordinator dies is given out again: none is.
    await wait_until(lambda: len(cluster.ledger()) == 64, what="every rollout is with its worker")
    cluster.kill("coordinator")
    await quiet(cluster, 1.0)
    stored = int(cluster.redis.command("HGET", run_key(RUN, "COUNT"), "tokens_stored").split()[1])
    assert 0 < cluster.generated() - stored <= 64 * (FLUSH_TOKENS + 1)
    await cluster.coordinator()
    await load.submit(16)
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == 80
    assert load.generated_twice() == 0


async def test_a_worker_that_dies_meanwhile_is_not_waited_for_beyond_the_grace(cluster: Cluster, begin: Begin) -> None:
    load = await begin()
    await load.submit(64)
    await load.more_tokens(64 * 12)
    cluster.kill("coordinator", "w1")
    await cluster.coordinator()
    await load.settle()
    assert 0 < load.interruptions() <= 32
    load.check_losses()
    assert not [record for record in cluster.ledger("w1") if record.start]
