"""What a refused call held is freed, though its objects were set aside while it was under way."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from ebbtide.coordinator.object_aging import set_aside
from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity
from ebbtide.testing import EmbeddedRedis, wait_until


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()


async def freed(held: Sequence["weakref.ref[Any]"]) -> None:
    """Wait until a collection, which does not look at what was set aside, has freed it all."""

    def nothing_left() -> bool:
        gc.collect()
        return all(ref() is None for ref in held)

    await wait_until(nothing_left, what="all that the call held is freed")


class Held:
    """Watches what calls hold: their writes, and their commands' replies in the connection to the store."""

    def __init__(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = list[weakref.ref[Any]]()
        writes, link = cluster.coordinator.writes, cluster.coordinator.link
        carry_out, put = writes.carry_out, link._put

        def watched_carry_out(turn: Any, write: Callable[[], Awaitable[Any]]) -> Any:
            self.all.append(weakref.ref(write))
            return carry_out(turn, write)

        def watched_put(packed: bytes, reply: "asyncio.Future[Any]") -> None:
            self.all.append(weakref.ref(reply))
            put(packed, reply)

        monkeypatch.setattr(writes, "carry_out", watched_carry_out)
        monkeypatch.setattr(link, "_put", watched_put)


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
        await asyncio.sleep(0)
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
    seen = list(held.all)
    assert len(seen) > 1
    await freed(seen)


async def test_a_refused_episode_leaves_nothing(
    small: Any, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await small.run()
    held = Held(small, monkeypatch)
    await refuse(small, redis_server, run.complete("e", "unknown"), InvalidRequest)
    seen = list(held.all)
    assert len(seen) > 1
    await freed(seen)


async def test_a_read_that_failed_leaves_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await small.run()
    recovery, run = small.coordinator._recovery, small.coordinator.state.runs["r"]
    held = list[weakref.ref[Any]]()

    async def fail(run: Any) -> None:
        held.append(weakref.ref(asyncio.current_task()))
        raise NoCapacity("away", retry_after_s=1.0)

    monkeypatch.setattr(recovery, "_reread", fail)
    run.stale = True
    with pytest.raises(NoCapacity):
        await recovery.refresh(run)
    monkeypatch.undo()
    await freed(held)
