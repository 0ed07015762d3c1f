"""Blobs for peers: within a bound, at once or when they come, and never waited for in vain for long."""

import asyncio

from ebbtide.transfer import BlobCache
from tests.support.waiting import wait_until


def test_the_oldest_used_go_first_and_the_bound_holds() -> None:
    cache = BlobCache(30)
    for name in (b"a", b"b", b"c"):
        cache.put(name, bytes(10))
    assert cache.get(b"a") == bytes(10)
    cache.put(b"d", bytes(15))
    assert (cache.get(b"b"), cache.get(b"c")) == (None, None)
    assert cache.get(b"a") is not None
    assert cache.get(b"d") is not None
    cache.put(b"e", bytes(31))
    assert cache.get(b"e") is None
    cache.put(b"a", bytes(10))
    assert cache.size == 25


async def test_who_waits_gets_the_blob_when_it_comes_kept_or_not() -> None:
    cache = BlobCache(0)
    with cache.arriving([b"a", b"b"]):
        waiters = [asyncio.create_task(cache.wait(b"a", 10.0)) for _ in range(3)]
        await wait_until(lambda: len(cache._waiting.get(b"a", ())) == 3)
        cache.put(b"a", b"data", keep=False)
        assert await asyncio.gather(*waiters) == [b"data"] * 3
    assert not cache._waiting


async def test_what_is_not_on_its_way_is_not_waited_for() -> None:
    cache = BlobCache(100)
    async with asyncio.timeout(5):
        assert await cache.wait(b"a", 1000.0) is None
        with cache.arriving([b"a"]):
            cache.put(b"a", b"data", keep=False)
            assert await cache.wait(b"a", 1000.0) is None, "it has come, and a mirror has it"


async def test_the_end_of_a_pull_is_told_to_those_who_wait() -> None:
    cache = BlobCache(100)
    with cache.arriving([b"a"]):
        waiter = asyncio.create_task(cache.wait(b"a", 1000.0))
        await wait_until(lambda: b"a" in cache._waiting)
    async with asyncio.timeout(5):
        assert await waiter is None
    assert not cache._waiting


async def test_while_a_pull_is_planned_any_blob_may_be_on_its_way() -> None:
    cache = BlobCache(100)
    with cache.planning():
        waiters = [asyncio.create_task(cache.wait(name, 1000.0)) for name in (b"a", b"b")]
        await wait_until(lambda: len(cache._waiting) == 2)
        coming = cache.arriving([b"a"])
        coming.__enter__()
    async with asyncio.timeout(5):
        assert await waiters[1] is None
        cache.put(b"a", b"data")
        assert await waiters[0] == b"data"
    coming.__exit__(None, None, None)


async def test_waiting_is_bounded_and_leaves_nothing_behind() -> None:
    cache = BlobCache(100)
    with cache.arriving([b"a"]):
        assert await cache.wait(b"a", 0.01) is None
        waiter = asyncio.create_task(cache.wait(b"a", 1000.0))
        await wait_until(lambda: b"a" in cache._waiting)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert not cache._waiting
        cache.put(b"a", b"data")
        assert await cache.wait(b"a", 0.0) == b"data"
