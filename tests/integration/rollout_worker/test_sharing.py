"""Workers of one host share one mirror: what one fetched, the others find, and no engine ever reads a mixture."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.rollout_worker.installs.weight_store import EngineNeeds
from ebbtide.transfer import Mirror
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import Sampling
from tests.fakes.scripted_engine import ScriptedEngine
from tests.integration.rollout_worker.reading import Reads
from tests.support.waiting import wait_until

House = Any  # the fixtures' classes live in conftest.py
Houses = Callable[[str], Awaitable[Any]]


async def test_who_comes_second_fetches_nothing(houses: Houses, reads: Reads) -> None:
    first, second = await houses("w1"), await houses("w2")
    await first.worker()
    assert first.relay.served == 4
    await second.worker()
    assert first.relay.served == 4
    assert reads[0] == reads[1]


async def test_two_at_once_fetch_each_tile_once(houses: Houses, reads: Reads) -> None:
    pair = [await houses(name) for name in ("w1", "w2")]
    for house in pair:
        await house.worker(version=0)
    relay = pair[0].relay
    for number in (1, 2, 3):
        version = relay.publish(number)
        for house in pair:
            house.coordinator.install(version)
        for house in pair:
            await house.coordinator.hear("installed", number)
        assert relay.served == 4 * number
    assert [number for number, _ in reads] == [1, 1, 2, 2, 3, 3]
    assert reads[0::2] == reads[1::2]


async def test_the_engines_of_a_host_install_side_by_side(houses: Houses, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [await houses(name) for name in ("w1", "w2")]
    for house in pair:
        await house.worker(version=0)
    together, install = asyncio.Barrier(2), ScriptedEngine.install

    async def meet(engine: ScriptedEngine, version: int, weights: Path, changes: Path | None = None) -> float:
        await together.wait()
        return await install(engine, version, weights, changes)

    monkeypatch.setattr(ScriptedEngine, "install", meet)
    version = pair[0].relay.publish(1)
    for house in pair:
        house.coordinator.install(version)
    for house in pair:
        await house.coordinator.hear("installed")


async def test_a_mirror_that_was_moved_on_is_brought_back_before_the_install(houses: Houses, reads: Reads) -> None:
    slow, fast = await houses("w1"), await houses("w2")
    await slow.worker()
    await fast.worker()
    relay = slow.relay
    slow.coordinator.assign("r1", Sampling(max_tokens=4000), max_version=1)
    await wait_until(lambda: slow.coordinator.length("r1") > 4)
    second, third = relay.publish(2), relay.publish(3)
    slow.coordinator.install(second)
    await wait_until(lambda: relay.served == 8, what="the second version in the mirror")
    fast.coordinator.install(third)
    await fast.coordinator.hear("installed", 2)
    slow.coordinator.cancel("r1")
    await slow.coordinator.hear("installed", 2)
    assert [number for number, _ in reads] == [1, 1, 3, 2]
    assert len({tensors["weight"] for _, tensors in reads}) == 3


async def test_a_mirror_whose_puller_left_is_filled_by_the_next(houses: Houses, reads: Reads) -> None:
    first, second = await houses("w1"), await houses("w2")
    leaver = await first.worker()
    await second.worker()
    relay = first.relay
    relay.flowing.clear()
    asked = relay.asked
    version = relay.publish(2)
    first.coordinator.install(version)
    await wait_until(lambda: relay.asked > asked)
    second.coordinator.install(version)
    await leaver.end()
    relay.flowing.set()
    await second.coordinator.hear("installed", 2)
    assert reads[-1][0] == 2
    assert "installed" in first.coordinator.heard
    assert len(first.coordinator.heard["installed"]) == 1


def hosts(house: House, number: int) -> list[str]:
    """The hosts that a worker named itself of, in what it told the relay of a version."""
    return [one.holder.host for one in house.relay.told if (one.holder.name, one.version) == (house.name, number)]


async def test_a_mirror_locked_by_one_who_does_nothing_is_left_alone_until_that_one_has_ended(
    house: House, reads: Reads
) -> None:
    await house.worker(pull_patience_s=0.2)
    mirror = await asyncio.to_thread(Mirror, house.relay.manifests[1], house.mirrors)
    async with mirror.hold():
        for number in (2, 3):
            house.coordinator.install(house.relay.publish(number))
            await house.coordinator.hear("installed", number)
            assert reads[-1][0] == number
        assert mirror.holds(house.relay.manifests[1]), "untouched"
        assert hosts(house, 3)[-1] != hosts(house, 1)[0], "it shares nothing now"
    house.coordinator.install(house.relay.publish(4))
    await house.coordinator.hear("installed", 4)
    assert mirror.holds(house.relay.manifests[4])
    assert hosts(house, 4)[-1] == hosts(house, 1)[0]
    mirror.close()


async def test_who_is_kept_waiting_by_a_relay_is_waited_for_longer_than_anybodys_patience(houses: Houses) -> None:
    first, second = await houses("w1"), await houses("w2")
    for house in (first, second):
        await house.worker(pull_patience_s=0.2)
    relay = first.relay
    relay.flowing.clear()
    asked = relay.asked
    version = relay.publish(2)
    first.coordinator.install(version)
    await wait_until(lambda: relay.asked > asked)
    second.coordinator.install(version)
    seen = time.monotonic()
    await wait_until(lambda: time.monotonic() - seen > 1.5, what="many times the patience")
    relay.flowing.set()
    for house in (first, second):
        await house.coordinator.hear("installed", 2)
    assert relay.served == 8
    await wait_until(lambda: hosts(second, 2), what="its word to the relay, which follows")
    assert set(hosts(second, 2)) == set(hosts(first, 2))


async def test_a_slow_install_is_waited_for_longer_than_anybodys_patience(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await houses("w1"), await houses("w2")
    for house in (first, second):
        await house.worker(pull_patience_s=0.2)
    relay, going, install = first.relay, asyncio.Event(), ScriptedEngine.install
    begun: list[int] = []

    async def wait(engine: ScriptedEngine, version: int, weights: Path, changes: Path | None = None) -> float:
        begun.append(version)
        await going.wait()
        return await install(engine, version, weights, changes)

    monkeypatch.setattr(ScriptedEngine, "install", wait)
    first.coordinator.install(relay.publish(2))
    await wait_until(lambda: begun == [2])
    second.coordinator.install(relay.publish(3))
    seen = time.monotonic()
    await wait_until(lambda: time.monotonic() - seen > 1.5, what="many times the patience")
    assert begun == [2], "the mirror is read still"
    going.set()
    for house in (first, second):
        await house.coordinator.hear("installed", 2)
    assert set(hosts(second, 3)) == set(hosts(first, 2))


async def test_who_finds_the_mirror_filled_meanwhile_asks_nobody(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [await houses(name) for name in ("w1", "w2")]
    for house in pair:
        await house.worker()
    relay, looks, holds = pair[0].relay, [0], EngineNeeds.met_by

    def look(needs: EngineNeeds, mirror: Mirror, manifest: Any) -> bool:
        looks[0] += 1
        return holds(needs, mirror, manifest)

    monkeypatch.setattr(EngineNeeds, "met_by", look)
    asked, version = relay.asked, relay.publish(2)
    mirror = await asyncio.to_thread(Mirror, relay.manifests[1], pair[0].mirrors)
    async with mirror.hold(shared=True):  # both may look, and neither may fill it
        for house in pair:
            house.coordinator.install(version)
        await wait_until(lambda: looks[0] >= 2)
    for house in pair:
        await house.coordinator.hear("installed", 2)
    assert relay.asked - asked <= 3, "the streams of one pull"
    pulls = {one.holder.name for one in relay.told if one.version == 2 and not one.done}
    assert len(pulls) == 1
    mirror.close()


async def test_a_worker_whose_mirror_was_moved_on_sends_nobody_to_itself(houses: Houses) -> None:
    first, second = await houses("w1"), await houses("w2")
    await first.worker(peer_listen="127.0.0.1:0", kind=WorkerKind.RESERVED)
    await second.worker()
    relay = first.relay

    def told() -> list[Any]:
        return [one for one in relay.told if (one.holder.name, one.version) == (first.name, 1)]

    await wait_until(lambda: any(one.done and one.holder.address and one.holder.lasting for one in told()))
    second.coordinator.install(relay.publish(2))
    await second.coordinator.hear("installed", 2)
    before = len(told())
    await wait_until(lambda: len(told()) > before)
    last = told()[-1]
    assert (last.done, last.holder.address, last.holder.lasting, list(last.have)) == (True, "", False, [])


async def test_a_host_without_room_for_a_mirror_keeps_weights_in_a_workers_own_memory(
    house: House, reads: Reads, tmp_path: Path, monkeypatch: Any
) -> None:
    import ebbtide.rollout_worker.installs.host_mirrors as module
    from ebbtide.errors import NoCapacity

    def make(manifest: Any, folder: Path | None) -> Mirror:
        if folder is not None:
            raise NoCapacity("no room", retry_after_s=1.0)
        return Mirror(manifest, None)

    monkeypatch.setattr(module, "Mirror", make)
    await house.worker()
    assert reads[-1][0] == 1
    assert not house.mirrors.exists() or not any(house.mirrors.iterdir())


async def test_two_runs_of_one_architecture_do_not_share(houses: Houses, reads: Reads) -> None:
    first, second = await houses("w1"), await houses("w2")
    await first.worker()
    relay = first.relay
    await second.worker(version=0)
    other = relay.publish(1, run_id="run-2")
    second.coordinator.install(other, "run-2")
    await second.coordinator.hear("installed")
    assert relay.served == 8


async def test_the_last_worker_of_a_host_leaves_nothing_behind(houses: Houses) -> None:
    first, second = await houses("w1"), await houses("w2")
    workers = [await first.worker(), await second.worker()]
    assert any(first.mirrors.iterdir())
    await workers[0].end()
    assert any(first.mirrors.iterdir())
    await workers[1].end()
    assert not first.mirrors.exists() or not any(first.mirrors.iterdir())


async def test_a_mirror_of_its_own_needs_no_folder(house: House, reads: Reads) -> None:
    await house.worker(mirror_dir="")
    assert reads[-1][0] == 1
    assert not house.mirrors.exists()


async def test_an_install_fails_when_the_mirror_lacks_the_version_after_three_pulls(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await houses("w1")
    await house.worker()
    looks = 0

    def look(*_: object) -> bool:
        nonlocal looks
        looks += 1
        return False

    with monkeypatch.context() as patch:
        patch.setattr(EngineNeeds, "met_by", look)
        house.coordinator.install(house.relay.publish(2))
        failed = await house.coordinator.hear("install_failed")
    assert "after each of 3 pulls" in failed.message
    assert not failed.unreachable
    assert looks == 7, "under the lock of each install, and under that of each pull between"
    house.coordinator.install(house.relay.publish(3))
    await house.coordinator.hear("installed", 2)
