"""An installer whose engine gave its weights up installs nothing until they are back: what it served, and whole."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.installs.installer import InstallNotNow
from tests.support.waiting import wait_until
from tests.unit.rollout_worker.installing import Worker, version


@asynccontextmanager
async def installing(worker: Worker) -> AsyncIterator[Worker]:
    """It serves version 1."""
    task = asyncio.create_task(worker.installer.run())
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.installer.current == version(1) and not worker.installer.busy)
    yield worker
    worker.installer.stop()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with installing(Worker()) as worker:
        yield worker


async def test_what_the_engine_served_comes_back_whole_and_not_by_changes(worker: Worker) -> None:
    assert worker.installer.rest()
    await worker.installer.restore()
    assert worker.made == [(1, True), (1, False)]


async def test_a_version_that_comes_meanwhile_is_what_they_come_back_as(worker: Worker) -> None:
    assert worker.installer.rest()
    worker.installer.set_target(version(2))
    await asyncio.sleep(0)
    assert worker.made == [(1, True)]
    await worker.installer.restore()
    assert worker.made == [(1, True), (2, False)], "in one reload"
    assert worker.installer.current == version(2)


async def test_where_that_one_cannot_be_loaded_the_engine_wakes_with_what_it_served(worker: Worker) -> None:
    worker.bad = {2}
    assert worker.installer.rest()
    worker.installer.set_target(version(2))
    await worker.installer.restore()
    assert worker.installer.current == version(1)
    assert worker.made == [(1, True), (1, False)]


class Lender:
    """Lends the device as a test says."""

    def __init__(self) -> None:
        self.wakes = True
        self.asked: list[float] = []
        self.free = asyncio.Event()
        self.free.set()

    async def spell(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self.free.wait()

    def may_wake(self) -> bool:
        return self.wakes


async def test_a_target_that_was_taken_back_during_the_pull_leaves_all_as_it_was() -> None:
    lender = Lender()
    async with installing(Worker(lender)) as worker:
        assert worker.installer.rest()
        lender.wakes = False
        with pytest.raises(InstallNotNow):
            await worker.installer.restore()
        assert worker.installer.current == version(1)
        assert worker.made == [(1, True)]
        lender.wakes = True
        await worker.installer.restore()
        assert worker.made == [(1, True), (1, False)]


async def test_an_install_asks_for_a_spell_once_all_is_at_hand_and_only_then() -> None:
    lender = Lender()
    async with installing(Worker(lender)) as worker:
        lender.free.clear()
        lender.asked.clear()
        worker.looks.clear()
        worker.pulling.clear()
        worker.installer.set_target(version(2))
        await wait_until(lambda: worker.looks == ["pull"])
        assert not lender.asked
        worker.pulling.set()
        await wait_until(lambda: lender.asked)
        assert worker.looks == ["pull", "locked"]
        assert worker.made == [(1, True)]
        lender.free.set()
        await wait_until(lambda: worker.made == [(1, True), (2, True)])


async def test_it_does_not_rest_while_another_version_is_on_its_way_or_before_the_first(worker: Worker) -> None:
    assert not Worker().installer.rest()
    worker.installer.set_target(version(2))
    assert not worker.installer.rest()
    await wait_until(lambda: worker.installer.current == version(2) and not worker.installer.busy)
    assert worker.installer.rest()


async def test_where_the_version_is_gone_the_next_one_ends_the_rest(worker: Worker) -> None:
    assert worker.installer.rest()
    worker.gone = {1}
    for _ in range(2):
        with pytest.raises(Unavailable):
            await worker.installer.restore()
    worker.installer.set_target(version(2))
    await wait_until(lambda: worker.installer.current == version(2))
    await worker.installer.restore()
    assert [number for number, _ in worker.made] == [1, 2], "they are back already"


async def test_weights_do_not_come_back_beside_an_install(worker: Worker) -> None:
    assert worker.installer.rest()
    worker.gone = {1}
    with pytest.raises(Unavailable):
        await worker.installer.restore()
    worker.installing.clear()
    worker.installer.set_target(version(2))
    await wait_until(lambda: worker.installer.installing)
    with pytest.raises(Unavailable, match="on its way"):
        await worker.installer.restore()
    worker.installing.set()
    await wait_until(lambda: worker.installer.current == version(2))
    await worker.installer.restore()
    assert worker.made == [(1, True), (2, True)]


async def test_a_worker_that_leaves_ends_its_pull_and_begins_nothing_more() -> None:
    worker = Worker()
    running = asyncio.create_task(worker.installer.run())
    worker.pulling.clear()
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.looks == ["pull"])
    worker.installer.stop()
    await asyncio.wait_for(running, 5.0)
    assert not worker.installer.busy
    assert not worker.made


async def test_a_worker_that_leaves_ends_an_install_that_has_begun() -> None:
    worker = Worker()
    running = asyncio.create_task(worker.installer.run())
    worker.installing.clear()
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.installer.installing)
    worker.installer.set_target(version(2))
    worker.installer.stop()
    worker.installing.set()
    await asyncio.wait_for(running, 5.0)
    assert worker.made == [(1, True)]
