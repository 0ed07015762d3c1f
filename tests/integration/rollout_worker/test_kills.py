"""Whoever is killed at whatever tile of a version: what was verified is kept, and no engine ever reads a mixture."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.free_ports import free_port
from ebbtide.types.run import Sampling
from tests.fakes.links import Way
from tests.integration.rollout_worker.reading import Reads, pulled
from tests.integration.rollout_worker.training import Trainer
from tests.support.waiting import wait_until

House = Any  # the fixtures' classes live in conftest.py and relays.py
Houses = Callable[[str], Awaitable[Any]]
LiveRelay = Any
TILES, TILE = 24, 1 << 20
#: The boundary looked at each time; the others are for the night.
_OFTEN = {11}
at_each_boundary = pytest.mark.parametrize(
    "tiles",
    [pytest.param(tiles, marks=() if tiles in _OFTEN else pytest.mark.nightly) for tiles in range(TILES)],
)


@pytest.fixture
async def trainer(live: LiveRelay) -> AsyncIterator[Trainer]:
    trainer = Trainer(live.way.address, elements=TILES * TILE // 2)
    yield trainer
    await trainer.close()


def stop_behind(way: Way, tiles: int) -> None:
    """Let no more than so many tiles come back, and the lists before them."""
    way.back.limit = way.back.passed + tiles * TILE + (TILE // 2)


def verified(house: House) -> int:
    """Tiles of the host's mirror that are what the table of their digests and states says."""
    tables = [path.read_bytes() for path in house.mirrors.glob("mirror-*/digests")]
    return sum(table[64 + 32 * TILES : 64 + 33 * TILES].count(2) for table in tables)


async def serves(house: House, version: int) -> None:
    """The worker generates, by this version and no other."""
    name = f"r{len(house.coordinator.finished)}"
    house.coordinator.assign(name, Sampling(max_tokens=8))
    await wait_until(lambda: name in house.coordinator.finished)
    assert set(house.coordinator.versions(name)) == {version}


@at_each_boundary
async def test_a_relay_killed_behind_any_tile_delays_a_version_and_nothing_else(
    house: House, live: LiveRelay, trainer: Trainer, reads: Reads, tiles: int
) -> None:
    await house.worker(version=0, relay=live.way.address, pull_patience_s=30.0)
    house.coordinator.install(await trainer.step(), publisher=trainer.key)
    await house.coordinator.hear("installed")
    trainer.forget()
    version = await trainer.step()
    before = pulled()
    stop_behind(live.way, tiles)
    house.coordinator.install(version, publisher=trainer.key)
    await wait_until(lambda: live.way.back.silent, what="so many tiles")
    await serves(house, 1)
    live.kill()
    live.way.cut()
    live.way.back.release()
    await live.start()
    await house.coordinator.hear("installed", 2)
    await serves(house, 2)
    assert reads[1] == (2, trainer.exact())
    assert pulled() - before <= trainer.dense + 4 * TILE, "what had come was not fetched again"


@at_each_boundary
async def test_a_peer_killed_behind_any_tile_is_replaced(
    houses: Houses, live: LiveRelay, trainer: Trainer, reads: Reads, tmp_path: Path, tiles: int
) -> None:
    where = f"127.0.0.1:{free_port()}"
    way = await Way.open(where)
    try:
        first, second = await houses("w1"), await houses("w2")
        await first.worker(version=0, relay=live.way.address, peer_listen=where, peer_advertise=way.address)
        await second.worker(version=0, relay=live.way.address, mirror_dir=str(tmp_path / "other-host"))
        version = await trainer.step()
        first.coordinator.install(version, publisher=trainer.key)
        await first.coordinator.hear("installed")
        stop_behind(way, tiles)
        second.coordinator.install(version, publisher=trainer.key)
        await wait_until(lambda: way.back.silent, what="so many tiles from the peer")
        await way.close()
        await second.coordinator.hear("installed")
        await serves(second, 1)
        assert [number for number, _ in reads] == [1, 1]
        assert reads[1] == (1, trainer.exact())
    finally:
        await way.close()


@at_each_boundary
async def test_what_a_worker_killed_behind_any_tile_had_is_found_by_the_next_of_its_host(
    houses: Houses, live: LiveRelay, trainer: Trainer, reads: Reads, tiles: int
) -> None:
    first, second = await houses("w1"), await houses("w2")
    process = await first.process("--relay", live.way.address, version=0)
    version = await trainer.step()
    stop_behind(live.way, tiles)
    first.coordinator.install(version, publisher=trainer.key)
    await wait_until(lambda: live.way.back.silent, what="so many tiles")
    await wait_until(lambda: verified(first) >= tiles - 4, what="what came, in the mirror")
    process.kill()
    process.wait(10)
    live.way.cut()
    live.way.back.release()
    before = pulled()
    await second.worker(version=0, relay=live.way.address)
    second.coordinator.install(version, publisher=trainer.key)
    await second.coordinator.hear("installed")
    await serves(second, 1)
    assert reads == [(1, trainer.exact())]
    assert pulled() - before <= trainer.dense - max(0, tiles - 4) * TILE, "what was verified is kept"
