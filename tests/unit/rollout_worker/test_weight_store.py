"""Pulls of a borrowed worker run beside who is served, so they give way."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ebbtide.rollout_worker.service import threads_for
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.types.fleet import WorkerKind
from tests.fakes.scripted_settings import ENGINE


def niceness() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def below() -> int:
    """That of a thread which the calling one starts, as a mirror's mending does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(niceness).result()


async def test_threads_of_a_borrowed_workers_pulls_have_the_lowest_priority_and_they_alone() -> None:
    before = niceness()
    threads = threads_for(WorkerSettings(kind=WorkerKind.BORROWED, grant_dir="/nowhere", engine=ENGINE))
    try:
        assert await threads.run(niceness) == 19
        assert await threads.run(below) == 19
    finally:
        threads.close()
    assert niceness() == before


@pytest.mark.parametrize("kind", [WorkerKind.RESERVED, WorkerKind.SPOT])
async def test_other_workers_pull_as_fast_as_they_can(kind: WorkerKind) -> None:
    threads = threads_for(WorkerSettings(kind=kind))
    try:
        assert await threads.run(niceness) == niceness()
    finally:
        threads.close()
