"""Versions that the SDK publishes reach engines exactly, for little more than what changed."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.integration.rollout_worker.reading import Reads, pulled
from tests.integration.rollout_worker.training import Trainer
from tests.support.waiting import wait_until

House = Any  # the fixtures' classes live in conftest.py and relays.py
Houses = Callable[[str], Awaitable[Any]]
LiveRelay = Any


@pytest.fixture
async def trainer(live: LiveRelay) -> AsyncIterator[Trainer]:
    trainer = Trainer(live.way.address)
    yield trainer
    await trainer.close()


async def test_a_worker_that_missed_five_versions_gets_the_newest_for_what_changed(
    house: House, live: LiveRelay, trainer: Trainer, reads: Reads
) -> None:
    await house.worker(version=0, relay=live.way.address)
    house.coordinator.install(await trainer.step(), publisher=trainer.key)
    await house.coordinator.hear("installed")
    assert reads[-1] == (1, trainer.exact())
    for _ in range(4):
        await trainer.step()
    before = pulled()
    house.coordinator.install(await trainer.step(), publisher=trainer.key)
    await house.coordinator.hear("installed", 2)
    assert reads[-1] == (6, trainer.exact())
    assert pulled() - before < trainer.dense / 2


async def test_a_late_joiner_of_another_host_gets_what_the_others_serve(
    houses: Houses, live: LiveRelay, trainer: Trainer, reads: Reads, tmp_path: Path
) -> None:
    first, second = await houses("w1"), await houses("w2")
    await first.worker(version=0, relay=live.way.address, peer_listen="127.0.0.1:0")
    for number in (1, 2):
        first.coordinator.install(version := await trainer.step(), publisher=trainer.key)
        await first.coordinator.hear("installed", number)
    await wait_until(partial(serves, live, number), what="the relay's knowledge of who serves it")
    await second.worker(version=0, relay=live.way.address, mirror_dir=str(tmp_path / "other"))
    before = pulled("peer")
    second.coordinator.install(version, publisher=trainer.key)
    await second.coordinator.hear("installed")
    assert reads[-1] == (2, trainer.exact())
    assert pulled("peer") > before


async def serves(live: LiveRelay, version: int) -> bool:
    """Whether the relay knows somebody who has the version whole, and gives it to others."""
    holders = (await live.describe("run-1")).holders
    return any(one.holder.address and one.version == version and one.done for one in holders)


async def test_a_pull_goes_on_where_it_was_when_the_relay_was_killed(
    house: House, live: LiveRelay, trainer: Trainer, reads: Reads
) -> None:
    version = await trainer.step()
    await house.worker(version=0, relay=live.way.address, pull_patience_s=30.0)
    back = live.way.back
    back.limit = back.passed + trainer.dense // 2
    house.coordinator.install(version, publisher=trainer.key)
    await wait_until(lambda: back.silent, what="a part of the version")
    live.kill()
    live.way.cut()
    back.release()
    await live.start()
    await house.coordinator.hear("installed")
    assert reads == [(1, trainer.exact())]
    assert REGISTRY.get_sample_value("ebbtide_worker_installs_total", {"outcome": "installed"})


async def test_who_has_what_and_how_long_installs_took_is_known_at_the_relay(
    house: House, live: LiveRelay, trainer: Trainer
) -> None:
    await house.worker(version=0, relay=live.way.address, site="here", script={"install_s": 0.05})
    house.coordinator.install(await trainer.step(), publisher=trainer.key)
    await house.coordinator.hear("installed")

    async def told() -> Any:
        holders = (await live.describe("run-1")).holders
        return next((one for one in holders if one.install_s > 0), None)

    holder = await wait_until(told)
    assert (holder.holder.name, holder.holder.site, holder.version, holder.done) == ("w1", "here", 1, True)
    assert holder.install_s >= 0.05
