"""The fleet's list has every run with a record: what is not on it no coordinator takes over."""

from collections.abc import AsyncIterator

import pytest

from ebbtide.store.connection import StoreConnection
from ebbtide.store.scripts import run_key
from ebbtide.store.store import Store
from ebbtide.types.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"))


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(StoreConnection(redis_url), "term")
    await store.link.open()
    await store.leadership.seize("a:1", 30.0)
    yield store
    await store.link.close()


async def test_runs_are_listed_in_the_order_of_their_first_submission(store: Store) -> None:
    for run_id in ("b", "a", "c", "b"):
        await store.runs.submit(run_id, SPEC)
    assert await store.runs.ids() == ["b", "a", "c"]


async def test_a_run_whose_record_has_expired_leaves_the_list(store: Store) -> None:
    await store.runs.submit("r", SPEC)
    await store.link.call("DEL", run_key("r", "RUN"))
    await store.runs.forget("r")
    assert await store.runs.ids() == []


async def test_a_run_that_was_made_anew_meanwhile_stays_on_the_list(store: Store) -> None:
    await store.runs.submit("r", SPEC)
    await store.runs.forget("r")
    assert (await store.runs.take_over()).live == ["r"]
