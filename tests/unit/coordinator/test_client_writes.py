"""Clients' writes go on to their end, wait for their locks, and end with the coordinator."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ebbtide.coordinator.attempt_transitions import ClientWrites
from ebbtide.errors import StoreUnavailable


class SlowStore:
    """Writes end when the test says so."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.done = asyncio.Event(), list[str](), list[str]()

    async def write(self, name: str) -> str:
        self.begun.append(name)
        await self.go_on.wait()
        self.done.append(name)
        return name


async def settled() -> None:
    """Everything that can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cut(call: "asyncio.Task[str]") -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def begin(writes: ClientWrites, store: SlowStore, name: str, lock: str = "l") -> "asyncio.Task[str]":
    return asyncio.create_task(writes.carry_out(writes.lock("k", lock), lambda: store.write(name)))


async def test_a_write_that_has_begun_goes_on_after_its_caller_left() -> None:
    writes, store = ClientWrites(), SlowStore()
    call = begin(writes, store, "a")
    await settled()
    await cut(call)
    assert (store.begun, writes.under_way) == (["a"], 1)
    store.go_on.set()
    await writes.settle(10.0)
    assert (store.done, writes.under_way) == (["a"], 0)


async def test_callers_that_leave_before_their_lock_is_free_leave_nothing() -> None:
    writes, store = ClientWrites(), SlowStore()
    calls = [begin(writes, store, str(number)) for number in range(100)]
    await settled()
    for call in calls[:-1]:
        await cut(call)
    await settled()
    assert (store.begun, writes.under_way) == (["0"], 2)
    store.go_on.set()
    assert await calls[-1] == "99"
    assert store.done == ["0", "99"]


@pytest.mark.parametrize(("steps", "carried_out"), [(0, []), (1, ["a"]), (2, ["a"])])
async def test_one_that_leaves_at_once_leaves_no_half_write(steps: int, carried_out: list[str]) -> None:
    """After one step of the loop the write exists, and begins before its caller leaves. After two it has begun."""
    writes, store = ClientWrites(), SlowStore()
    call = begin(writes, store, "a")
    for _ in range(steps):
        await asyncio.sleep(0)
    call.cancel()
    store.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await settled()
    assert (store.begun, store.done) == (carried_out, carried_out)
    assert not writes.under_way


async def test_writes_of_other_names_do_not_wait() -> None:
    writes, store = ClientWrites(), SlowStore()
    calls = [begin(writes, store, name, lock=name) for name in "abc"]
    await settled()
    assert store.begun == ["a", "b", "c"]
    store.go_on.set()
    assert await asyncio.gather(*calls) == ["a", "b", "c"]
    assert writes.lock("k", "a") is not writes.lock("k", "b")


async def test_errors_reach_the_caller_and_the_next_one_begins() -> None:
    writes, store = ClientWrites(), SlowStore()
    store.go_on.set()

    async def away() -> str:
        raise StoreUnavailable("away")

    lock = writes.lock("k", "l")
    with pytest.raises(StoreUnavailable, match="away"):
        await writes.carry_out(lock, away)
    assert await begin(writes, store, "a") == "a"


async def test_a_caller_that_left_does_not_cut_off_what_its_lock_watches_for() -> None:
    writes, store, cut_off = ClientWrites(), SlowStore(), list[str]()

    @asynccontextmanager
    async def lock() -> AsyncIterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            cut_off.append("cut off")
            raise

    call = asyncio.create_task(writes.carry_out(lock(), lambda: store.write("a")))
    await settled()
    await cut(call)
    await settled()
    assert not cut_off
    await writes.close()  # as a process that ends does with what is not done in time
    assert (cut_off, store.done, writes.under_way) == (["cut off"], [], 0)


async def test_what_a_failed_write_held_is_freed_without_a_collection() -> None:
    writes, go_on = ClientWrites(), asyncio.Event()

    async def fail() -> None:
        await go_on.wait()
        raise StoreUnavailable("full")

    def begin_one() -> "tuple[asyncio.Task[None], weakref.ref[object]]":
        async def write() -> None:
            await fail()

        return asyncio.create_task(writes.carry_out(writes.lock("k", "l"), write)), weakref.ref(write)

    call, held = begin_one()
    await settled()
    gc.disable()
    try:
        go_on.set()
        with pytest.raises(StoreUnavailable):
            await call
        del call
        await settled()
        assert held() is None
    finally:
        gc.enable()
