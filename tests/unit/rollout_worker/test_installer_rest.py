"""An installer whose engine gave its weights up installs nothing until they are back: what it served, and whole."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.holds import Holds
from ebbtide.rollout_worker.installer import Installer
from ebbtide.rollout_worker.weights import Installation
from ebbtide.testing import wait_until
from ebbtide.types.weights import PolicyVersion


def version(number: int) -> Installation:
    return Installation("run", PolicyVersion(policy="policy", version=number))


class Worker:
    """What stands around an installer: an engine and a mirror that take note, attempts that forbid nothing."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bool]] = []  # versions, and whether changes were made use of
        self.gone: set[int] = set()
        self.installed: Any = None
        attempts: Any = SimpleNamespace(holds=Holds(), ended=asyncio.Event(), admit=lambda *_: True)
        presence: Any = SimpleNamespace(installed=lambda _: None)
        weights: Any = self
        engine: Any = self
        self.installer = Installer(engine, weights, attempts, presence, lambda _: None)

    async def install(self, number: int, path: Path, changes: Path | None = None) -> float:
        self.made.append((number, changes is not None))
        return 0.0

    async def prepare(self, wanted: Installation) -> object:
        if wanted.version.version in self.gone:
            raise Unavailable("retired")
        return object()

    @asynccontextmanager
    async def ready(self, *_: object) -> AsyncIterator[tuple[Path, Path | None]]:
        yield Path("weights"), Path("changes")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    """One that serves version 1."""
    worker = Worker()
    task = asyncio.create_task(worker.installer.run())
    worker.installer.wish(version(1))
    await wait_until(lambda: worker.installer.current == version(1) and not worker.installer.busy)
    yield worker
    worker.installer.stop()
    with suppress(asyncio.CancelledError):
        await task


async def test_what_the_engine_served_comes_back_whole_and_not_by_changes(worker: Worker) -> None:
    assert worker.installer.rest()
    await worker.installer.restore()
    assert worker.made == [(1, True), (1, False)]


async def test_a_version_that_comes_meanwhile_waits_until_they_are_back(worker: Worker) -> None:
    assert worker.installer.rest()
    worker.installer.wish(version(2))
    await asyncio.sleep(0)
    assert worker.made == [(1, True)]
    await worker.installer.restore()
    await wait_until(lambda: worker.made == [(1, True), (1, False), (2, True)])


async def test_it_does_not_rest_while_another_version_is_on_its_way_or_before_the_first(worker: Worker) -> None:
    assert not Worker().installer.rest()
    worker.installer.wish(version(2))
    assert not worker.installer.rest()
    await wait_until(lambda: worker.installer.current == version(2) and not worker.installer.busy)
    assert worker.installer.rest()


async def test_where_the_version_is_gone_the_next_one_ends_the_rest(worker: Worker) -> None:
    assert worker.installer.rest()
    worker.gone = {1}
    for _ in range(2):
        with pytest.raises(Unavailable):
            await worker.installer.restore()
    worker.installer.wish(version(2))
    await wait_until(lambda: worker.installer.current == version(2))
    await worker.installer.restore()
    assert [number for number, _ in worker.made] == [1, 2], "they are back already"
