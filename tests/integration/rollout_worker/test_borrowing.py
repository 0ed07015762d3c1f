"""A borrowed worker generates while its guard lets it, and stands still by itself when nobody does."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.testing import wait_until
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import Sampling
from tests.integration.rollout_worker.conftest import House, WorkerTask
from tests.integration.rollout_worker.guards import Guard, guarding

LONG = Sampling(temperature=1.0, max_tokens=4000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "grants"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
async def guard(folder: Path, house: House) -> AsyncIterator[Guard]:
    async with guarding(folder, house.name) as made:
        yield made


async def borrow(house: House, folder: Path, **changes: Any) -> WorkerTask:
    return await house.worker(kind=WorkerKind.BORROWED, grant_dir=str(folder), **changes)


async def test_a_worker_generates_while_it_is_granted_and_not_beyond(
    house: House, guard: Guard, folder: Path, expected: Callable[[int], list[int]]
) -> None:
    worker = await borrow(house, folder, version=0)
    await guard.found()
    guard.allow(64)
    house.coordinator.install(house.relay.publish(1))
    await house.coordinator.hear("installed")
    house.coordinator.assign("r", LONG)
    await wait_until(lambda: house.coordinator.length("r") > 20)
    guard.allow(0)
    await wait_until(lambda: not guard.page.steps().stepping)
    made = house.generated()
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].held)
    assert house.generated() == made, "a token came without a budget"
    assert house.coordinator.length("r") == made, "what was made is stored"
    guard.allow(64)
    await wait_until(lambda: not house.coordinator.heard["heartbeat"][-1].held)
    await wait_until(lambda: house.coordinator.length("r") > made + 20)
    assert house.coordinator.ids("r")[: made + 20] == expected(made + 20)
    await worker.end()
