"""A store with replicas: nothing is answered that they do not have, and a failover is followed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, StoreUnavailable
from ebbtide.store.connection import StoreConnection
from ebbtide.store.store import Store
from tests.support.redis_servers import EmbeddedRedis, EmbeddedSentinel
from tests.support.waiting import wait_until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    """A primary and its replica, in step."""
    primary = EmbeddedRedis(tmp_path / "a", tcp=True)
    with primary, EmbeddedRedis(tmp_path / "b", replica_of=primary) as replica:
        asyncio.run(_online(primary, 1))
        yield primary, replica


async def _online(primary: EmbeddedRedis, count: int) -> None:
    """Wait until the primary counts so many replicas: a replica says somewhat earlier that its link is up."""
    await wait_until(lambda: primary.command("INFO", "replication").count(b"state=online") == count, what="replicas")


async def test_nothing_is_answered_before_the_replica_has_it(pair: Any) -> None:
    primary, replica = pair
    link = StoreConnection(primary.url, patience_s=1.0, replicas=1)
    await link.open(patience_s=10)
    assert await asyncio.gather(*(link.call("SET", f"k{number}", "1") for number in range(200))) == [b"OK"] * 200
    assert replica.command("DBSIZE") == b":200\r\n"
    replica.freeze()
    try:
        with pytest.raises(StoreUnavailable, match=r"fewer than 1 replicas .* confirm its writes; start them"):
            await link.call("SET", "unconfirmed", "1")
        waiting = [asyncio.create_task(link.call("SET", f"late{number}", "1", patience_s=30)) for number in range(5)]
        await asyncio.wait(waiting, timeout=1.5)
        assert not any(task.done() for task in waiting)
    finally:
        replica.thaw()
    assert await asyncio.gather(*waiting) == [b"OK"] * 5
    assert await link.call("GET", "unconfirmed", patience_s=10) == b"1"
    await link.close()


async def test_a_replica_is_not_taken_for_the_store(pair: Any) -> None:
    link = StoreConnection(pair[1].url, patience_s=0.5)
    with pytest.raises(StoreUnavailable, match="is a read-only replica; point the coordinator at the primary"):
        await link.open()


async def test_a_primary_that_is_made_a_replica_is_left_at_once(pair: Any) -> None:
    primary, replica = pair
    link = StoreConnection(primary.url, patience_s=5)
    await link.open()
    life = link.incarnation
    replica.command("REPLICAOF", "NO", "ONE")
    primary.command("REPLICAOF", "127.0.0.1", str(replica.port))
    with pytest.raises(StoreUnavailable, match="read-only replica"):
        await link.call("SET", "k", "1", patience_s=1)
    primary.command("REPLICAOF", "NO", "ONE")
    with pytest.raises(StoreUnavailable, match="came back"):
        await link.call("SET", "k", "1", incarnation=life)
    assert await link.call("SET", "k", "1") == b"OK"
    assert link.incarnation != life
    await link.close()


async def test_a_failover_is_followed_and_gives_another_life(pair: Any, tmp_path: Path) -> None:
    primary, replica = pair
    with EmbeddedSentinel(tmp_path / "s", primary, down_after_s=0.5) as sentinel:
        link = StoreConnection(
            f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/ebbtide", patience_s=30, replicas=1
        )
        await link.open()
        assert (await Store(link, "term").server_info()).durable_after_s == 0.0
        life = link.incarnation
        await link.call("SET", "k", "1")
        await wait_until(lambda: b"num-slaves\r\n$1\r\n1\r\n" in sentinel.command("SENTINEL", "masters"))
        link.replicas = 0
        primary.freeze()  # as if the machine stood still: the kernel still takes what is sent to it
        try:
            with pytest.raises(StoreUnavailable, match="came back"):
                await link.call("SET", "k", "2")
            assert await link.call("GET", "k") == b"1"
            assert link.incarnation != life
            assert replica.info("role") == "master"
        finally:
            primary.thaw()
        await wait_until(lambda: primary.info("role") == "slave", 30, what="the former primary as a replica")
        assert await link.call("SET", "k", "3") == b"OK"
        assert replica.info("role") == "master"
        # It took the write that was sent to it as it stood still, until it has the new primary's data.
        await wait_until(lambda: primary.command("GET", "k") == b"$1\r\n3\r\n", 30, what="the new primary's data")
        await link.close()


async def test_a_failover_without_confirmation_may_lose_the_newest_seconds(pair: Any, tmp_path: Path) -> None:
    with EmbeddedSentinel(tmp_path / "s", pair[0]) as sentinel:
        link = StoreConnection(sentinel.url, patience_s=10)
        await link.open()
        assert (await Store(link, "term").server_info()).durable_after_s == 5.0
        await link.close()


async def test_behind_a_plain_address_a_write_is_durable_once_the_replica_has_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.store.durability._UNCONFIRMED_S", 1.0)
    primary, replica = pair
    link = StoreConnection(primary.url, patience_s=10)
    await link.open()
    assert (await Store(link, "term").server_info()).durable_after_s == 1.0
    replica.freeze()
    try:
        await link.call("SET", "k", "1")
        waiting = asyncio.create_task(link.durable())
        await asyncio.wait([waiting], timeout=2.0)
        assert not waiting.done()
    finally:
        replica.thaw()
    await waiting
    await link.close()


async def test_one_replica_that_confirms_does_not_speak_for_another(pair: Any, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "c", replica_of=pair[0]):
        await _online(pair[0], 2)
        for replicas, claim in ((1, 5.0), (2, 0.0)):
            link = StoreConnection(pair[0].url, patience_s=10, replicas=replicas)
            await link.open()
            assert (await Store(link, "term").server_info()).durable_after_s == claim
            await link.close()


async def test_a_store_that_would_wipe_its_replicas_is_found_out(pair: Any) -> None:
    pair[0].command("CONFIG", "SET", "appendonly", "no")
    link = StoreConnection(pair[0].url, patience_s=10)
    await link.open()
    assert (await Store(link, "term").server_info()).wipes
    await link.close()


async def test_sentinels_that_are_away_are_named_without_passwords() -> None:
    link = StoreConnection(
        "redis+sentinel://user:secret@127.0.0.1:1,127.0.0.1:2/name?sentinel_password=other", patience_s=0.3
    )
    with pytest.raises(StoreUnavailable, match="no Sentinel names a primary of name that is up") as refused:
        await link.open()
    assert "127.0.0.1:1,127.0.0.1:2/name" in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "other" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://h:1", "redis+sentinel:///name", "redis+sentinel://h:x/name", "redis+sentinel://h:1/name?x=1"],
)
async def test_a_bad_sentinel_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="store_url"):
        StoreConnection(url)
