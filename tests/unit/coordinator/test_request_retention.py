"""Which runs are looked at for requests and sessions that are due, and what happens to those that were open."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.coordinator.api import sessions
from ebbtide.coordinator.api.sessions import RequestRetention
from ebbtide.errors import StoreUnavailable
from ebbtide.store.sessions import ExpiredRequests
from ebbtide.types.run import LeaseRef

NOTHING = ExpiredRequests(0, False, [])


@pytest.fixture(autouse=True)
def scripted_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "changing", lambda run: run.changing())


class Run:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        yield


class House:
    """Runs with scripted answers of the store, and what was done with them."""

    def __init__(self, *run_ids: str) -> None:
        self.runs = {run_id: Run(run_id) for run_id in run_ids}
        self.asked: list[str] = []
        self.answers: dict[str, list[ExpiredRequests | Exception]] = {}
        self.over: list[Any] = []
        self.notified: list[tuple[str, ...]] = []
        state = SimpleNamespace(runs=self.runs, clock=lambda: 0.0, at_work=lambda _: list(self.runs.values()))
        attempts = SimpleNamespace(while_it_lives=self._living, over=lambda _, ended: self.over.extend(ended))
        parts: Any = SimpleNamespace(
            state=state, attempts=attempts, store=SimpleNamespace(sessions=SimpleNamespace(expire=self._expire)),
            notifier=SimpleNamespace(notify=lambda *topic: self.notified.append(topic)),
            settings=SimpleNamespace(request_kept_s=600.0, session_idle_s=3600.0),
        )  # fmt: skip
        self.retention = RequestRetention(parts)

    @asynccontextmanager
    async def _living(self, _: Any) -> AsyncIterator[None]:
        yield

    async def _expire(self, run_id: str, *, kept_s: float, idle_s: float) -> ExpiredRequests:
        assert (kept_s, idle_s) == (600.0, 3600.0)
        self.asked.append(run_id)
        answer = self.answers.get(run_id, [])
        found = answer.pop(0) if answer else NOTHING
        if isinstance(found, Exception):
            raise found
        return found

    async def round(self) -> list[str]:
        self.asked.clear()
        await self.retention.round()
        return self.asked


async def test_a_run_without_requests_is_asked_for_once_until_a_gateway_writes_to_it() -> None:
    house = House("a", "b")
    assert await house.round() == ["a", "b"]
    assert await house.round() == []
    house.retention.note("a", LeaseRef("a", "trainer", "f"))
    house.retention.note("b", LeaseRef("b", "gateway/g1", "f"))
    assert await house.round() == ["b"]


async def test_a_run_that_has_some_is_asked_for_each_time_and_until_nothing_more_is_due() -> None:
    house = House("a")
    house.answers["a"] = [ExpiredRequests(64, True, []), ExpiredRequests(3, True, []), ExpiredRequests(0, True, [])]
    assert await house.round() == ["a"] * 3
    assert await house.round() == ["a"]
    assert await house.round() == []


async def test_what_was_open_ends_at_its_worker_and_for_its_readers() -> None:
    house = House("a")
    house.answers["a"] = [ExpiredRequests(1, False, [("r1", "attempt"), ("r2", "")])]
    await house.round()
    assert house.over == [("r1", "attempt"), ("r2", "")]
    assert house.notified == [("tokens", "a", "r1"), ("tokens", "a", "r2")]


async def test_a_run_is_asked_for_again_after_the_store_was_away() -> None:
    house = House("a")
    house.answers["a"] = [StoreUnavailable("away")]
    with pytest.raises(StoreUnavailable):
        await house.round()
    assert await house.round() == ["a"]


async def test_a_gateway_that_writes_while_a_run_is_looked_at_has_it_asked_for_again() -> None:
    house = House("a")
    run = house.runs["a"]

    @asynccontextmanager
    async def changing() -> AsyncIterator[None]:
        yield
        house.retention.note("a", LeaseRef("a", "gateway/g1", "f"))

    run.changing = changing  # type: ignore[method-assign]
    await house.round()
    assert await house.round() == ["a"]
