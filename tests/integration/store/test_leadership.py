"""The lease of the fleet, and what a coordinator can write once another has taken over: nothing."""

import asyncio
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import pytest
import redis.asyncio

from ebbtide.store.connection import StoreConnection, TermSuperseded
from ebbtide.store.scripts import FLEET, LEADER, run_prefix, script
from ebbtide.store.store import Store
from ebbtide.types.run import EnvironmentSpec, RunSpec
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

SPEC = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"))
#: They read; and `lead` has tests of its own.
UNFENCED = {
    *("read_run", "read_open", "read_tokens", "finished_page", "events_page", "trajectory_page"),
    *("ended_history", "quota_used", "read_unverified", "lead"),
}
OF_THE_FLEET = {"keep_incarnation"}
WRITERS = sorted(
    name
    for path in (resources.files("ebbtide.store") / "lua").iterdir()
    if (name := path.name.removesuffix(".lua")) not in UNFENCED | {"lib"}
)


async def opened(url: str, term: str) -> Store:
    store = Store(StoreConnection(url), term)
    await store.link.open()
    return store


@pytest.fixture
async def old(redis_url: str) -> AsyncIterator[Store]:
    """It leads, and has a run."""
    store = await opened(redis_url, "old")
    await store.leadership.seize("old:1", 30.0)
    await store.runs.submit("r", SPEC)
    yield store
    await store.link.close()


@pytest.fixture
async def new(redis_url: str) -> AsyncIterator[Store]:
    store = await opened(redis_url, "new")
    yield store
    await store.link.close()


async def all_of_it(url: str) -> dict[Any, Any]:
    async with redis.asyncio.from_url(url) as link:
        return {key: await link.dump(key) for key in await link.keys("*") if key != LEADER.encode()}


async def test_nobody_leads_a_store_that_is_new(new: Store) -> None:
    assert await new.leadership.leader(30.0) == ""
    assert await new.leadership.take("new:1", 30.0) == ""
    assert await new.leadership.leader(30.0) == "new:1"


async def test_a_lease_that_another_holds_is_not_taken_and_its_holder_is_named(old: Store, new: Store) -> None:
    assert await new.leadership.take("new:1", 30.0) == "old:1"
    await old.leadership.renew("old:1", 30.0, patience_s=3.0)
    assert await old.runs.submit("another", SPEC)


async def test_a_lease_that_is_not_renewed_ends_by_the_stores_clock(old: Store, new: Store) -> None:
    await old.leadership.renew("old:1", 0.2, patience_s=3.0)
    await wait_until(lambda: _free(new))
    assert await new.leadership.take("new:1", 30.0) == ""
    assert (await new.runs.take_over()).live == ["r"]


async def _free(store: Store) -> bool:
    return not await store.leadership.leader(30.0)


async def test_a_lease_of_more_than_its_time_to_live_ends_once_a_standby_has_looked(old: Store, new: Store) -> None:
    """The store's clock was set back, and the leader has died."""
    assert await new.leadership.leader(0.2) == "old:1"  # it was taken for 30 s
    await wait_until(lambda: _free(new))
    assert await new.leadership.take("new:1", 30.0) == ""


async def test_of_two_that_wait_one_gets_it(old: Store, new: Store, redis_url: str) -> None:
    await old.leadership.release(patience_s=3.0)
    third = await opened(redis_url, "third")
    took = await asyncio.gather(new.leadership.take("new:1", 30.0), third.leadership.take("third:1", 30.0))
    assert sorted(took) in (["", "new:1"], ["", "third:1"])
    await third.link.close()


async def test_a_lease_that_ended_and_that_nobody_took_is_renewed(old: Store, new: Store) -> None:
    await old.leadership.renew("old:1", 0.05, patience_s=3.0)
    await wait_until(lambda: _free(new))
    await old.leadership.renew("old:1", 30.0, patience_s=3.0)
    assert await new.leadership.take("new:1", 30.0) == "old:1"


async def test_a_call_that_is_repeated_takes_the_lease_once(new: Store) -> None:
    assert await new.leadership.take("new:1", 30.0) == ""
    assert await new.leadership.take("new:1", 30.0) == ""


async def test_seizing_ends_who_led_at_once(old: Store, new: Store) -> None:
    await new.leadership.seize("new:1", 30.0)
    with pytest.raises(TermSuperseded):
        await old.leadership.renew("old:1", 30.0, patience_s=3.0)
    with pytest.raises(TermSuperseded):
        await old.leadership.release(patience_s=3.0)
    assert old.link.superseded.is_set()
    assert await new.leadership.leader(30.0) == "new:1"


@pytest.mark.parametrize("name", WRITERS)
async def test_a_superseded_coordinator_writes_nothing(old: Store, new: Store, redis_url: str, name: str) -> None:
    await new.leadership.seize("new:1", 30.0)
    await new.runs.take_over()
    before = await all_of_it(redis_url)
    rest = ['[["x"],["a:0"],["a:1"],[12],[]]', "t" * 12] if name == "append" else ["0"] * 8
    with pytest.raises(TermSuperseded):
        await old.link.run(script(name), FLEET if name in OF_THE_FLEET else run_prefix("r"), "old", *rest)
    assert await all_of_it(redis_url) == before


async def test_it_cannot_take_a_run_back_from_who_is_only_about_to_claim_it(old: Store, new: Store) -> None:
    """It was frozen in the middle of its own takeover."""
    await new.leadership.seize("new:1", 30.0)
    with pytest.raises(TermSuperseded):
        await old.runs.take_over()
    assert (await new.runs.take_over()).live == ["r"]


async def test_it_cannot_make_a_run_that_the_other_would_not_know_of(old: Store, new: Store, redis_url: str) -> None:
    await new.leadership.seize("new:1", 30.0)
    assert (await new.runs.take_over()).live == ["r"]
    before = await all_of_it(redis_url)
    with pytest.raises(TermSuperseded):
        await old.runs.submit("late", SPEC)
    assert await all_of_it(redis_url) == before


async def test_a_store_that_forgot_who_leads_is_told_again(old: Store, redis_server: EmbeddedRedis) -> None:
    redis_server.command("FLUSHALL")
    await old.leadership.renew("old:1", 30.0, patience_s=3.0)
    assert await old.leadership.leader(30.0) == "old:1"
    assert await old.runs.submit("r", SPEC)
