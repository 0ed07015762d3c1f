"""Engines that change weights in place are told exactly what changed since what they serve, or nothing at all."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.transfer import Puller
from tests.fakes.scripted_engine import ScriptedEngine
from tests.integration.rollout_worker.reading import tensors
from tests.integration.rollout_worker.training import Trainer

House = Any  # the fixtures' classes live in conftest.py and relays.py
Houses = Callable[[str], Awaitable[Any]]
LiveRelay = Any
#: The weights of an engine by its bytes, and whether they were changed in place.
Engines = dict[ScriptedEngine, tuple[dict[str, bytes], bool]]


@pytest.fixture
async def trainer(live: LiveRelay) -> AsyncIterator[Trainer]:
    trainer = Trainer(live.way.address)
    yield trainer
    await trainer.close()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """What engines make of the changes that they are given, and of the weights where they are given none."""
    found: Engines = {}
    install = ScriptedEngine.install

    async def change(engine: ScriptedEngine, version: int, weights: Path, changes: Path | None = None) -> float:
        took = await install(engine, version, weights)
        found[engine] = (changed(found[engine][0], tensors(changes)), True) if changes else (tensors(weights), False)
        assert found[engine][0] == tensors(weights)
        return took

    monkeypatch.setattr(ScriptedEngine, "install", change)
    monkeypatch.setattr("ebbtide.rollout_worker.service._in_place", lambda _: True)
    return found


def changed(before: dict[str, bytes], changes: dict[str, bytes]) -> dict[str, bytes]:
    after = {}
    for name, data in before.items():
        array = np.frombuffer(data, np.uint16).copy()
        if f"{name}.indices" in changes:
            indices = np.frombuffer(changes[f"{name}.indices"], np.int64)
            array[indices] = np.frombuffer(changes[f"{name}.values"], np.uint16)
        after[name] = array.tobytes()
    return after


async def install(house: House, trainer: Trainer, version: Any, count: int) -> None:
    house.coordinator.install(version, publisher=trainer.key)
    await house.coordinator.hear("installed", count)


async def test_changes_lead_from_one_version_to_the_next(
    house: House, live: LiveRelay, trainer: Trainer, engines: Engines
) -> None:
    await house.worker(version=0, relay=live.way.address)
    for count in (1, 2, 3):
        await install(house, trainer, await trainer.step(), count)
        [(weights, in_place)] = engines.values()
        assert weights == trainer.exact()
        assert in_place == (count > 1)


async def test_changes_that_one_worker_found_serve_all_of_its_host(
    houses: Houses, live: LiveRelay, trainer: Trainer, engines: Engines
) -> None:
    pair = [await houses(name) for name in ("w1", "w2")]
    for house in pair:
        await house.worker(version=0, relay=live.way.address)
    for count in (1, 2):
        version = await trainer.step()
        for house in pair:
            await install(house, trainer, version, count)
    assert list(engines.values()) == [(trainer.exact(), True)] * 2


async def test_who_missed_a_version_gets_no_changes_that_begin_behind_it(
    houses: Houses, live: LiveRelay, trainer: Trainer, engines: Engines
) -> None:
    first, second = await houses("w1"), await houses("w2")
    for house in (first, second):
        await house.worker(version=0, relay=live.way.address)
    version = await trainer.step()
    for house in (first, second):
        await install(house, trainer, version, 1)
    for count in (2, 3):
        version = await trainer.step()
        await install(first, trainer, version, count)
    await install(second, trainer, version, 2)
    assert list(engines.values()) == [(trainer.exact(), True), (trainer.exact(), False)]


async def test_an_engine_of_slices_is_given_no_changes_which_others_of_its_host_may_have_found_for_theirs(
    house: House, live: LiveRelay, trainer: Trainer, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = trainer.weights["up"].shape
    monkeypatch.setattr(ScriptedEngine, "boxes", {"up": (((0, rows), (0, columns)),)})
    await house.worker(version=0, relay=live.way.address)
    for count in (1, 2):
        await install(house, trainer, await trainer.step(), count)
        [(weights, in_place)] = engines.values()
        assert weights["up"] == trainer.exact()["up"]
        assert not in_place


async def test_an_engine_of_slices_that_cover_all_of_it_holds_versions_as_one_that_takes_them_whole(
    house: House, live: LiveRelay, trainer: Trainer, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = {name: (tuple((0, size) for size in array.shape),) for name, array in trainer.weights.items()}
    monkeypatch.setattr(ScriptedEngine, "boxes", boxes)
    pulls: list[Any] = []
    pull = Puller.pull

    async def watch(puller: Puller, *args: Any, wanted: Any = None, **options: Any) -> Any:
        pulls.append(wanted)
        return await pull(puller, *args, wanted=wanted, **options)

    monkeypatch.setattr(Puller, "pull", watch)
    await house.worker(version=0, relay=live.way.address)
    for count in (1, 2):
        await install(house, trainer, await trainer.step(), count)
        assert list(engines.values()) == [(trainer.exact(), count > 1)]
    assert pulls == [None, None]


async def test_an_engine_that_may_be_a_mixture_ends_its_worker(
    house: House, live: LiveRelay, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await house.worker(version=0, relay=live.way.address)
    await install(house, trainer, await trainer.step(), 1)

    async def fail(engine: ScriptedEngine, version: int, weights: Path, changes: Path | None = None) -> float:
        raise EngineFailed("it broke in the middle of the install")

    monkeypatch.setattr(ScriptedEngine, "install", fail)
    house.coordinator.install(await trainer.step(), publisher=trainer.key)
    assert (await house.coordinator.hear("draining")).reason == "failed"
    await worker.task
    assert isinstance(worker.shutdown.failure, EngineFailed)
    assert len(house.coordinator.heard["installed"]) == 1
