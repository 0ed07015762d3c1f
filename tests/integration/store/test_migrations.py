"""The store's schema: stamped once, brought up to date step by step by whoever has the term, and never read too new."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.errors import StoreUnavailable
from ebbtide.store.connection import StoreConnection, TermSuperseded
from ebbtide.store.scripts import INDEX, NEWEST_SCHEMA, SCHEMA, TERM, run_key
from ebbtide.store.store import STEPS, MigrationStep, Schema
from ebbtide.types.run import EnvironmentSpec, RunSpec

Change = Callable[[StoreConnection, str], Awaitable[None]]


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[StoreConnection]:
    made = StoreConnection(redis_url)
    await made.open()
    yield made
    await made.close()


async def started(url: str) -> Coordinator:
    coordinator = Coordinator(CoordinatorSettings(store_url=url))
    await coordinator.open()
    return coordinator


async def plant(link: StoreConnection, *run_ids: str) -> None:
    """Live runs, and no stamp."""
    await link.call("SET", TERM, "former")
    for place, run_id in enumerate(run_ids, start=1):
        spec = '{"name":"n","model":"m","environment":{"name":"e","params":{}}}'
        record = ("spec", spec, "status", "PENDING", "message", "", "version", 0, "seq", 0, "created", 1)
        await link.call("HSET", run_key(run_id, "RUN"), *record)
        await link.call("HSET", run_key(run_id, "FENCE"), "term", "former")
        await link.call("ZADD", INDEX, place, run_id)


def counting(names: list[str], name: str) -> Change:
    async def change(link: StoreConnection, term: str) -> None:
        assert await link.call("GET", TERM) == term.encode()
        names.append(name)

    return change


async def test_an_empty_store_is_stamped_by_the_first_coordinator(link: StoreConnection, redis_url: str) -> None:
    coordinator = await started(redis_url)
    assert await link.call("GET", SCHEMA) == str(NEWEST_SCHEMA).encode()
    await coordinator.close()


async def test_a_store_without_a_stamp_gets_it_and_its_runs_go_on(link: StoreConnection, redis_url: str) -> None:
    await plant(link, "a", "b")
    coordinator = await started(redis_url)
    assert list(coordinator.state.runs) == ["a", "b"]
    assert await link.call("GET", SCHEMA) == str(NEWEST_SCHEMA).encode()
    await coordinator.close()


async def test_a_newer_store_is_refused_and_its_coordinator_goes_on(link: StoreConnection, redis_url: str) -> None:
    serving = await started(redis_url)
    await link.call("SET", SCHEMA, NEWEST_SCHEMA + 1)
    term = await link.call("GET", TERM)
    with pytest.raises(
        StoreUnavailable,
        match=f"has schema {NEWEST_SCHEMA + 1}, and this coordinator knows none above {NEWEST_SCHEMA}: ",
    ):
        await started(redis_url)
    assert await link.call("GET", TERM) == term
    await serving.store.leadership.renew("", 2.0, patience_s=2.0)  # or raises
    await serving.close()


@pytest.mark.parametrize("planted", ["one", "-1", "9" * 5000, "record"])
async def test_a_store_of_something_else_is_refused_before_it_is_taken(
    link: StoreConnection, redis_url: str, planted: str
) -> None:
    await plant(link, "a")
    if planted == "record":
        await link.call("HDEL", run_key("a", "RUN"), "created")
    else:
        await link.call("SET", SCHEMA, planted)
    with pytest.raises(StoreUnavailable, match=r"which is no number|its record lacks created"):
        await started(redis_url)
    assert await link.call("GET", TERM) == b"former"


async def test_a_live_run_of_a_later_release_is_refused_by_its_key_and_its_coordinator_goes_on(
    link: StoreConnection, redis_url: str
) -> None:
    serving = await started(redis_url)
    await serving.store.runs.submit("r", RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e")))
    spec = await link.call("HGET", run_key("r", "RUN"), "spec")
    await link.call("HSET", run_key("r", "RUN"), "spec", spec[:-1] + b',"tempo":2}')
    with pytest.raises(
        StoreUnavailable, match=r"spec of run r is of another release .*`tempo`.*; start a coordinator of"
    ):
        await started(redis_url)
    await serving.store.leadership.renew("", 2.0, patience_s=2.0)  # or raises
    await serving.close()


async def test_an_older_store_goes_through_each_step_that_it_lacks_in_order(link: StoreConnection) -> None:
    done: list[str] = []
    steps = [MigrationStep(number, f"to {number}", change=counting(done, f"to {number}")) for number in (1, 2, 3, 4)]
    await link.call("SET", TERM, "ours")
    await link.call("SET", SCHEMA, 2)
    assert await Schema(link, "ours", steps).migrate() == ["to 3", "to 4"] == done
    assert await link.call("GET", SCHEMA) == b"4"
    assert await Schema(link, "ours", steps).migrate() == []
    assert done == ["to 3", "to 4"]


async def test_a_coordinator_that_dies_amid_the_steps_leaves_the_rest_to_the_next(link: StoreConnection) -> None:
    """A step that moves a key of each run: half of it is done when the first one dies."""
    await plant(link, "a", "b")
    dies = asyncio.Event()

    async def move(link: StoreConnection, _term: str) -> None:
        for run_id in ("a", "b"):
            status = await link.call("HGET", run_key(run_id, "RUN"), "status")
            if status is not None:  # not moved before
                await link.call("HSET", run_key(run_id, "RUN"), "state", status)
                await link.call("HDEL", run_key(run_id, "RUN"), "status")
            if not dies.is_set():
                dies.set()
                raise StoreUnavailable("killed")

    steps = [*STEPS, MigrationStep(NEWEST_SCHEMA + 1, "status becomes state", change=move)]
    await link.call("SET", TERM, "first")
    with pytest.raises(StoreUnavailable, match="killed"):
        await Schema(link, "first", steps).migrate()
    assert await link.call("GET", SCHEMA) == str(NEWEST_SCHEMA).encode()  # the steps before are done for good
    await link.call("SET", TERM, "second")
    assert await Schema(link, "second", steps).migrate() == ["status becomes state"]
    assert await link.call("GET", SCHEMA) == str(NEWEST_SCHEMA + 1).encode()
    for run_id in ("a", "b"):
        assert await link.call("HMGET", run_key(run_id, "RUN"), "state", "status") == [b"PENDING", None]


async def test_a_superseded_coordinator_stamps_nothing(link: StoreConnection) -> None:
    async def overtaken(link: StoreConnection, _term: str) -> None:
        await link.call("SET", TERM, "another")

    await link.call("SET", TERM, "ours")
    with pytest.raises(TermSuperseded):
        await Schema(link, "ours", [MigrationStep(1, "long", change=overtaken)]).migrate()
    assert await link.call("GET", SCHEMA) is None


async def test_a_store_that_forgot_everything_is_stamped_again(link: StoreConnection, redis_url: str) -> None:
    coordinator = await started(redis_url)
    await link.call("DEL", TERM, SCHEMA)
    await coordinator.store.leadership.renew("", 2.0, patience_s=2.0)
    assert await link.call("GET", SCHEMA) == str(NEWEST_SCHEMA).encode()
    await coordinator.close()


def test_each_schema_has_its_step() -> None:
    steps: Any = [step.to for step in STEPS]
    assert steps == list(range(1, NEWEST_SCHEMA + 1))


def test_the_number_that_is_stamped_is_the_last_steps() -> None:
    assert STEPS[-1].to == NEWEST_SCHEMA


async def test_a_run_that_was_listed_and_is_submitted_then_is_not_swept_and_ends_nobody(
    link: StoreConnection, redis_url: str
) -> None:
    """Who died between the list and the run leaves a name alone: whoever takes over has it for one that ended."""
    serving = await started(redis_url)
    await serving.store.runs.submit("r", RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e")))
    assert not await serving.store.runs.sweep("r")
    assert not (await serving.store.runs.read("r")).status.ended
    await serving.close()
