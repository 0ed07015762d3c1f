"""What the store's own answers prove about acknowledged writes."""

import asyncio
import contextlib
import math
import random
from typing import Any, Self, cast

import pytest

from ebbtide.errors import StoreUnavailable
from ebbtide.store.connection import StoreConnection
from ebbtide.store.durability import _FSYNC_S, DurabilityHorizon, DurabilityWatch, StoreSample
from tests.support.waiting import wait_until


def horizon(*, sentinel: bool = False, confirmed: int = 0) -> DurabilityHorizon:
    return DurabilityHorizon(sentinel=sentinel, confirmed=confirmed)


def looked(seen: DurabilityHorizon, until: float, *, since: float = 0.0, every: float = 0.25, **said: Any) -> None:
    """Looks at a store that answers at once, and says this all the time."""
    for number in range(round((until - since) / every) + 1):
        at = since + number * every
        fields: dict[str, Any] = {"sent": at, "store_ms": round(at * 1000), "fsync": "everysec"}
        seen.note(StoreSample(**(fields | said)))


def test_each_write_is_durable_at_once_where_each_is_synced() -> None:
    seen = horizon()
    looked(seen, 1.0, fsync="always")
    assert seen.at_once
    assert seen.synced == 1.0


def test_under_everysec_a_write_is_durable_after_two_seconds() -> None:
    seen = horizon()
    looked(seen, 5.0)
    assert not seen.at_once
    assert (seen.before, seen.before_ms) == (3.0, 3000)


def test_what_was_stamped_while_a_look_was_on_its_way_is_not_durable_with_it() -> None:
    """A look proves what came before its question, and its time is that of its answer."""
    seen, reached = horizon(), dict[float, int]()
    looked(seen, 1.0)
    seen.note(StoreSample(sent=1.25, store_ms=5250, took_s=4.0, fsync="everysec"))
    for number in range(20):
        at = 5.5 + number / 4
        seen.note(StoreSample(sent=at, store_ms=round(at * 1000), fsync="everysec"))
        reached[seen.before] = seen.before_ms
    assert reached[1.25] <= 1250
    assert reached[seen.before] == 1000 * seen.before


def test_nothing_becomes_durable_while_an_fsync_does_not_end() -> None:
    seen = horizon()
    looked(seen, 5.0)
    looked(seen, 60.0, since=5.25, syncing=True)
    assert seen.before == 3.0
    looked(seen, 61.0, since=60.25)
    assert seen.before == 5.0, "an fsync that began after the last of these has ended"
    looked(seen, 63.0, since=61.25)
    assert seen.before == 61.0


def test_nothing_becomes_durable_while_the_append_only_file_cannot_be_written() -> None:
    seen = horizon()
    looked(seen, 5.0)
    looked(seen, 60.0, since=5.25, writes=False)
    assert seen.before == 3.0


def test_two_looks_that_a_stalled_server_answers_together_prove_nothing() -> None:
    seen = horizon()
    looked(seen, 60.0, store_ms=1000)
    assert seen.before == -math.inf


def test_while_its_clock_is_set_back_a_store_syncs_nothing_and_the_longer_claim_is_made() -> None:
    seen = horizon()
    looked(seen, 5.0, store_ms=7_200_000)
    for number in range(161):
        at = 5.25 + number / 4
        seen.note(StoreSample(sent=at, store_ms=round(at * 1000), fsync="everysec"))
    assert seen.before == 45.25 - 30.0


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_store_that_does_not_sync_while_it_rewrites_its_file_makes_the_longer_claim_only(fsync: str) -> None:
    seen = horizon()
    looked(seen, 29.0, fsync=fsync, skips_fsync=True)
    assert seen.before == -math.inf
    looked(seen, 40.0, since=29.25, fsync=fsync, skips_fsync=True)
    assert seen.before == 10.0
    seen.prove(35.0)
    looked(seen, 40.5, since=40.25, fsync=fsync, skips_fsync=True, waits=True)
    assert seen.before == 35.0, "WAITAOF knows better"


def test_behind_an_address_that_may_fail_over_a_write_is_durable_once_all_replicas_have_it() -> None:
    seen = horizon()
    looked(seen, 10.0, fsync="always", followed=True, offset=100, replicas={"a:1": 100, "b:1": 60})
    assert not seen.at_once
    assert seen.before == -math.inf
    looked(seen, 20.0, since=10.25, fsync="always", followed=True, offset=100, replicas={"a:1": 100, "b:1": 100})
    assert seen.before == 15.0


def test_a_replica_that_is_away_holds_the_claim_for_as_long_as_it_might_be_promoted() -> None:
    seen = horizon(sentinel=True)
    looked(seen, 10.0, fsync="always", followed=True, offset=100, replicas={"a:1": 100, "b:1": 100})
    looked(seen, 39.0, since=10.25, fsync="always", followed=True, offset=200, replicas={"a:1": 200})
    assert seen.before == 10.0
    looked(seen, 50.0, since=39.25, fsync="always", followed=True, offset=200, replicas={"a:1": 200})
    assert seen.before == 45.0


def test_a_replica_that_is_online_and_confirms_nothing_counts_as_gone_until_it_confirms_more() -> None:
    seen = horizon(sentinel=True)
    both = {"a:1": 100, "b:1": 100}
    looked(seen, 10.0, fsync="always", followed=True, offset=100, replicas=both)
    stuck = {"a:1": 200, "b:1": 100}
    looked(seen, 100.0, since=10.25, fsync="always", followed=True, offset=200, replicas=stuck)
    assert seen.before == 95.0
    assert seen.replicas == 1
    looked(seen, 101.0, since=100.25, fsync="always", followed=True, offset=200, replicas={"a:1": 200, "b:1": 150})
    assert seen.replicas == 2


def test_proofs_count_no_more_once_the_server_gives_none() -> None:
    seen = horizon()
    looked(seen, 5.0, waits=True)
    seen.prove(4.0)
    looked(seen, 10.0, since=5.25, waits=True)
    assert seen.before == 4.0
    looked(seen, 100.0, since=10.25, fsync="no")
    assert seen.before == 70.0


def test_replies_that_fewer_than_all_replicas_confirmed_are_not_durable_at_once() -> None:
    both = {"a:1": 100, "b:1": 100}
    for confirmed, at_once in ((1, False), (2, True)):
        seen = horizon(sentinel=True, confirmed=confirmed)
        looked(seen, 10.0, fsync="always", followed=True, offset=100, replicas=both)
        assert seen.at_once is at_once
        looked(seen, 11.0, since=10.25, fsync="always", followed=True, offset=100, replicas={"a:1": 100})
        assert seen.at_once is at_once, "the other one is only just away"


def test_the_horizon_never_moves_back() -> None:
    chance = random.Random(7)
    for _ in range(50):
        seen, before = horizon(sentinel=chance.random() < 0.5), -math.inf
        for number in range(200):
            offset = number * 10
            replicas = {name: offset - chance.randrange(60) for name in "abc" if chance.random() < 0.8}
            look = StoreSample(
                sent=number / 4,
                store_ms=number * 250,
                fsync=chance.choice(["always", "everysec"]),
                skips_fsync=chance.random() < 0.05,
                syncing=chance.random() < 0.3,
                offset=offset,
                replicas=replicas,
                followed=True,
            )
            seen.note(look)
            assert before <= seen.before <= look.sent
            before = seen.before


class Redis74:
    """A store of a version with WAITAOF. It syncs when it is told to."""

    def __init__(self) -> None:
        self.incarnation, self.replicas, self.sentinel, self.patience_s, self.away_s = "life", 0, False, 3.0, 0.0
        self.skips, self.asked = "yes", list[tuple[Any, ...]]()
        self.synced = asyncio.Event()

    def another(self) -> Self:
        return self

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, *command: Any, patience_s: float | None = None, incarnation: str = "") -> Any:
        await asyncio.sleep(0)
        if command[0] == "INFO":
            return b"redis_version:7.4.1\r\nserver_time_usec:1000000\r\naof_pending_bio_fsync:0\r\n"
        if command[0] == "CONFIG":
            return [b"appendonly", b"yes", b"appendfsync", b"always", b"no-appendfsync-on-rewrite", self.skips.encode()]
        self.asked.append(command)
        if command[0] == "WAITAOF":
            await self.synced.wait()
            return [1, 0]
        return b"OK"


async def test_a_server_that_knows_waitaof_is_asked_what_it_has_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_FSYNC_S, "everysec", 0.2)
    store = Redis74()
    watch = DurabilityWatch(cast("StoreConnection", store))
    running = asyncio.create_task(watch.run())
    watch.began()
    try:
        await wait_until(lambda: any(command[0] == "WAITAOF" for command in store.asked))
        waiting = asyncio.create_task(watch.until(asyncio.get_running_loop().time(), incarnation="life"))
        await asyncio.wait([waiting], timeout=0.6)
        assert not waiting.done()
        store.synced.set()
        async with asyncio.timeout(5):
            await waiting
        store.incarnation = "another"
        with pytest.raises(StoreUnavailable, match="came back"):
            await watch.until(math.inf, incarnation="life")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
