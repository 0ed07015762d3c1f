"""What a refused call held is freed without a collection: none looks at objects that were set aside meanwhile."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, StoreUnavailable
from ebbtide.gc_pauses import set_aside
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


class Held:
    """Watches what calls hold: their writes, and their commands' replies in the connection to the store."""

    def __init__(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = list[weakref.ref[Any]]()
        writes, link = cluster.coordinator.writes, cluster.coordinator.link
        carry_out, put = writes.carry_out, link._put

        def watched_carry_out(lock: Any, write: Callable[[], Awaitable[Any]]) -> Any:
            self.all.append(weakref.ref(write))
            return carry_out(lock, write)

        def watched_put(packed: bytes, reply: "asyncio.Future[Any]") -> None:
            self.all.append(weakref.ref(reply))
            put(packed, reply)

        monkeypatch.setattr(writes, "carry_out", watched_carry_out)
        monkeypatch.setattr(link, "_put", watched_put)

    async def freed(self) -> None:
        seen = list(self.all)
        assert len(seen) > 1
        await wait_until(lambda: all(ref() is None for ref in seen), what="all that the call held is freed")


@pytest.fixture
async def small(cluster_with: Any) -> AsyncIterator[Any]:
    async with cluster_with(max_open=2) as cluster:
        yield cluster


async def refuse(cluster: Any, redis: EmbeddedRedis, call: Awaitable[Any], error: type[EbbtideError]) -> None:
    """Make a call that is refused, and set all objects aside while the store has it."""
    redis.freeze()
    try:
        refused = asyncio.ensure_future(call)
        await wait_until(lambda: cluster.coordinator.writes.under_way, what="the write is under way")
        set_aside()
    finally:
        redis.thaw()
    with pytest.raises(error):
        await refused


async def test_a_refused_submit_leaves_nothing(
    small: Any, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await small.run()
    await run.submit("a", "b")
    held = Held(small, monkeypatch)
    await refuse(small, redis_server, run.submit("c"), NoCapacity)
    await held.freed()


async def test_a_refused_episode_leaves_nothing(
    small: Any, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await small.run()
    held = Held(small, monkeypatch)
    await refuse(small, redis_server, run.complete("e", "unknown"), InvalidRequest)
    await held.freed()


async def test_a_run_that_could_not_be_read_leaves_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await small.run()
    held, live = Held(small, monkeypatch), small.coordinator.state.runs["r"]

    async def away(run_id: str) -> bool:
        raise StoreUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(small.coordinator.store.runs, "lives", away)
        live.mirror.stale = True
        with pytest.raises(EbbtideError, match="away"):
            await run.announce(step=1)
    await held.freed()
