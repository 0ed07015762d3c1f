"""Checkpoints are written beside training: it goes on meanwhile, and nothing is committed before they are durable."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.service import train
from ebbtide.trainer.training_checkpoint import Store, TrainingState, latest
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import SETTINGS, feed, final_weights, make_spec, train_to_end


class Disk:
    """Holds the writing of checkpoints, but for the first `passing` ones, until it is set free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passing: int = 0) -> None:
        self.waiting = 0  # the step whose checkpoint is held
        self.free, self.begun, self.done = threading.Event(), list[int](), list[int]()
        begin = LocalLearning.begin_checkpoint

        def held(learning: LocalLearning, folder: Path, state: TrainingState, *, keep: int) -> Store:
            store = begin(learning, folder, state, keep=keep)
            self.begun.append(state.step)

            def write() -> Path:
                if len(self.done) >= passing:
                    self.waiting = state.step
                    assert self.free.wait(60)
                path = store()
                self.done.append(state.step)
                return path

            return write

        monkeypatch.setattr(LocalLearning, "begin_checkpoint", held)


def told(cluster: Any) -> list[float]:
    return [event.values["step"] for event in cluster.named("step")]


async def test_steps_go_on_beside_a_checkpoint_and_the_next_one_waits_for_it(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = make_cluster(make_spec(tiny_model, tmp_path / "calm"), lambda request: None)
    await train_to_end(calm, make_client(calm))
    disk, cluster = Disk(monkeypatch), make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
        await wait_until(lambda: max((one.step for one in cluster.versions), default=0) == 4, what="the last version")
        assert told(cluster) == [1, 2, 3]
        assert disk.begun == [2]
        assert not cluster.trained_episodes
        assert not cluster.named("checkpoint")
        disk.free.set()
    assert disk.done == [2, 4]
    assert told(cluster) == [1, 2, 3, 4]
    assert [event.values["step"] for event in cluster.named("checkpoint")] == [2, 4]
    assert cluster.counters["trained"] == 24
    expected, found = final_weights(calm), final_weights(cluster)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_a_trainer_that_ends_within_a_checkpoint_leaves_the_former_one_and_loses_and_repeats_nothing(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = make_cluster(make_spec(tiny_model, tmp_path / "calm", trainer={"checkpoint_every": 1}), lambda request: None)
    await train_to_end(calm, make_client(calm))
    disk = Disk(monkeypatch, passing=2)
    spec = make_spec(tiny_model, tmp_path, trainer={"checkpoint_every": 1})
    cluster = make_cluster(spec, lambda request: None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        first = asyncio.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
        await wait_until(lambda: disk.waiting == 3 and len(cluster.trained_episodes) == 12, what="the third checkpoint")
        committed = len(cluster.trained_episodes)
        first.cancel()
        await asyncio.wait({first})
        former = latest(tmp_path / "run-1" / "checkpoints")
        assert former is not None
        assert former.name == "step-000002"
        assert len(cluster.trained_episodes) == committed
        monkeypatch.undo()
        await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    assert len(cluster.trained_episodes) == len(set(cluster.trained_episodes)) == 24
    expected, found = final_weights(calm), final_weights(cluster)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    disk.free.set()


async def test_a_checkpoint_that_cannot_be_written_ends_the_trainer(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Store:
        def store() -> Path:
            raise OSError("No space left on device")

        return store

    monkeypatch.setattr(LocalLearning, "begin_checkpoint", full)
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    feeding = asyncio.create_task(feed(cluster))
    async with asyncio.timeout(60):
        with pytest.raises(OSError, match="No space left"):
            await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    feeding.cancel()
    assert not cluster.trained_episodes
