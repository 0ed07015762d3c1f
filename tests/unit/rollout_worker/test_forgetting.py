"""A run that is over: what is kept for it is given back, whatever an install of it is in the middle of."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.waiting import wait_until
from tests.unit.rollout_worker.installing import Worker, version


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    running = asyncio.create_task(worker.installer.run())
    yield worker
    assert not running.done(), "the installer goes on"
    running.cancel()
    await asyncio.wait({running})


async def test_what_is_installed_of_a_run_that_is_over_is_given_back(worker: Worker) -> None:
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.installer.current is not None)
    worker.installer.forget("run")
    await wait_until(lambda: "forgot run" in worker.looks)
    assert worker.installer.current is None


async def test_what_is_kept_of_another_run_stays(worker: Worker) -> None:
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.made == [(1, True)] and not worker.installer.busy)
    worker.installer.forget("another")
    assert worker.installer.current == version(1)


async def test_a_pull_ends_with_its_run(worker: Worker) -> None:
    worker.pulling.clear()
    worker.installer.set_target(version(1))
    await wait_until(lambda: "pull" in worker.looks)
    worker.installer.forget("run")
    await wait_until(lambda: "forgot run" in worker.looks)
    assert not worker.installer.busy
    assert not worker.made


async def test_an_install_that_has_begun_ends_first(worker: Worker) -> None:
    worker.installing.clear()
    worker.installer.set_target(version(1))
    await wait_until(lambda: worker.installer.installing)
    worker.installer.forget("run")
    assert "forgot run" not in worker.looks
    worker.installing.set()
    await wait_until(lambda: "forgot run" in worker.looks)
    assert worker.made == [(1, True)]
    assert worker.installer.current is None


async def test_another_run_is_served_behind_one_that_was_forgotten_in_its_pull(worker: Worker) -> None:
    worker.pulling.clear()
    worker.installer.set_target(version(1))
    await wait_until(lambda: "pull" in worker.looks)
    worker.installer.forget("run")
    worker.pulling.set()
    other = version(2)._replace(run_id="another")
    worker.installer.set_target(other)
    await wait_until(lambda: worker.installer.current == other)
    assert worker.made == [(2, True)]
