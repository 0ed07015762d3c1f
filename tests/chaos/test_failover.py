"""The store's primary is lost, and a Sentinel makes its replica the primary: nothing acknowledged is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin
from tests.chaos.test_killed_store import keep_submitting, quiet
from tests.support.redis_servers import EmbeddedRedis, EmbeddedSentinel
from tests.support.waiting import wait_until


class Pair:
    """A primary, its replica, and a Sentinel over both."""

    def __init__(self, directory: Path) -> None:
        self.primary = EmbeddedRedis(directory / "redis", tcp=True)
        self.replica = EmbeddedRedis(directory / "replica", replica_of=self.primary)
        self.sentinel = EmbeddedSentinel(directory / "sentinel", self.primary, down_after_s=1.0)

    async def start(self) -> None:
        self.primary.start()
        self.replica.start()
        await wait_until(lambda: self.replica.info("master_link_status") == "up", what="the replica in step")
        self.sentinel.start()
        known = b"num-slaves\r\n$1\r\n1\r\n"
        await wait_until(lambda: known in self.sentinel.command("SENTINEL", "masters"), what="the Sentinel's view")

    async def failed_over(self) -> None:
        def leads() -> bool:
            with suppress(ConnectionError):  # whoever is promoted hangs up on all that are connected
                return self.replica.info("role") == "master"
            return False

        await wait_until(leads, 30, what="the failover")

    async def primary_follows(self) -> None:
        def follows() -> bool:
            return (self.primary.info("role"), self.primary.info("master_link_status")) == ("slave", "up")

        await wait_until(follows, 60, interval=0.1, what="the former primary as a replica")

    def close(self) -> None:
        for server in (self.sentinel, self.replica, self.primary):
            server.close()


@pytest.fixture
async def pair(cluster: Cluster) -> AsyncIterator[Pair]:
    """In the place of the cluster's store; coordinators reach it through the Sentinel."""
    made = Pair(cluster.directory)
    try:
        await made.start()
        cluster.redis = made.primary
        cluster.store = lambda: None  # type: ignore[method-assign]
        yield made
    finally:
        made.close()


async def lose(pair: Pair, cluster: Cluster, begin: Begin, how: str, *, replicas: int, back: bool) -> None:
    """Lose the primary under load, and perhaps have it back as a replica."""
    load = await begin(store_url=pair.sentinel.url, store_replicas=replicas)
    load.forgetful = True
    await load.submit(64)
    load.watch_tokens(8)
    enough = asyncio.Event()
    submitting = asyncio.create_task(keep_submitting(load, enough))
    await load.more_tokens(800)
    getattr(pair.primary, how)()
    await pair.failed_over()
    if replicas:  # nobody is left to confirm: generation waits with what it has
        await quiet(cluster, 1.5)
    else:
        await load.more_tokens(300)
    if back:
        (pair.primary.thaw if how == "freeze" else pair.primary.start)()
        if not replicas:
            await load.more_tokens(200)  # while two servers take themselves for the primary
        await pair.primary_follows()
        await load.more_tokens(200)
        await load.publish(step=1)
    enough.set()
    await submitting
    run = await load.settle()
    assert run.counters["attempts"] - run.counters.get("moved", 0) == len(load.requests)
    assert load.generated_twice() == 0


async def test_what_the_replica_lacked_comes_again(pair: Pair, cluster: Cluster, begin: Begin) -> None:
    await lose(pair, cluster, begin, "kill", replicas=0, back=False)


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_primary_that_comes_back_becomes_a_replica(
    pair: Pair, cluster: Cluster, begin: Begin, replicas: int
) -> None:
    await lose(pair, cluster, begin, "kill", replicas=replicas, back=True)


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_primary_that_was_given_up_and_wakes_is_not_listened_to(
    pair: Pair, cluster: Cluster, begin: Begin, replicas: int
) -> None:
    await lose(pair, cluster, begin, "freeze", replicas=replicas, back=True)
