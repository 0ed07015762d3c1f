"""A step that is trained on its groups as they become whole, against a cluster in memory."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.service import train
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunEvent, RunSpec, RunStatus
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import (
    SETTINGS,
    apart,
    final_weights,
    make_spec,
    make_trajectories,
    train_to_end,
)


def streamed(**trainer: Any) -> dict[str, Any]:
    return {"trainer": {"minibatches": 1, "streaming": True, **trainer}, "batch": {"groups_per_step": 4}}


class SlowRollouts:
    """Stands for driver and workers whose groups end one after another.

    Each group ends once the trainer has added those before to its gradient. `stop` is called in the middle of step
    `stop_in`: half of its groups are added, and no other group is there.
    """

    def __init__(self, cluster: Any, patch: pytest.MonkeyPatch, stop_in: int = -1) -> None:
        self._cluster, self._stop_in, self.stop = cluster, stop_in, asyncio.Event()
        self.added: list[tuple[int, set[str]]] = []  # step, groups
        self.going_on = asyncio.Event()
        add = LocalLearning.add_groups

        def spy(learning: LocalLearning, trajectories: list[Trajectory], *, step: int, version: int) -> None:
            add(learning, trajectories, step=step, version=version)
            self.added.append((step, {one.group_id for one in trajectories}))

        patch.setattr(LocalLearning, "add_groups", spy)

    async def feed(self) -> None:
        cluster = self._cluster
        spec: RunSpec = cluster.run.spec
        for step in range(spec.trainer.steps):
            await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
            version = next(version.version for version in cluster.versions if version.step == step)
            made = make_trajectories(spec, step, version)
            for number, name in enumerate(sorted({one.group_id for one in made})):
                if step == self._stop_in and number == 2:
                    self.stop.set()
                    await self.going_on.wait()
                for one in made:
                    if one.group_id == name:
                        cursor = str(len(cluster.trajectories) + 1)
                        cluster.trajectories.append(msgspec.structs.replace(one, cursor=cursor))
                        cluster.counters["submitted"] += 1
                cluster.bell()
                await wait_until(lambda: any(name in groups for _, groups in self.added))  # noqa: B023
        await wait_until(lambda: cluster.settled() and cluster.versions[-1].step == spec.trainer.steps, timeout=30)
        cluster.finish(RunStatus.FINISHED, "")


async def test_a_streamed_run_trains_on_groups_while_others_are_awaited_and_ends_as_one_that_waits_for_all(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = make_cluster(make_spec(tiny_model, tmp_path / "a", **streamed(streaming=False)), lambda request: None)
    await train_to_end(waiting, make_client(waiting))
    cluster = make_cluster(make_spec(tiny_model, tmp_path / "b", **streamed()), lambda request: None)
    rollouts = SlowRollouts(cluster, monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouts.feed())
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    assert [groups for _, groups in rollouts.added] == [
        {f"s{step}.g{group}"} for step in range(4) for group in range(4)
    ]
    assert apart(final_weights(cluster), final_weights(waiting)) < 1e-3
    assert cluster.trained_episodes == waiting.trained_episodes
    for ours, theirs in zip(cluster.named("step"), waiting.named("step"), strict=True):
        assert 0 < ours.values["overlapped_s"] < ours.values["seconds_train"]
        assert "overlapped_s" not in theirs.values
        for name in ("trained", "taught", "tokens", "reward", "staleness_max", "learning_rate"):
            assert ours.values[name] == theirs.values[name]
        for name in ("loss", "grad_norm", "entropy", "logprob_gap", "importance_weight"):
            assert ours.values[name] == pytest.approx(theirs.values[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("stop_in", [1, 3])
async def test_a_trainer_that_ends_within_a_streamed_step_keeps_nothing_of_it_and_the_next_trains_its_groups_once(
    stop_in: int,
    tiny_model: Path,
    tmp_path: Path,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first checkpoint, and after it with a step to repeat."""
    whole = make_cluster(make_spec(tiny_model, tmp_path / "a", **streamed(streaming=False)), lambda request: None)
    await train_to_end(whole, make_client(whole))
    cluster = make_cluster(make_spec(tiny_model, tmp_path / "b", **streamed()), lambda request: None)
    client, rollouts = make_client(cluster), SlowRollouts(cluster, monkeypatch, stop_in)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(rollouts.feed())
        first = asyncio.create_task(train(client, cluster.lease("trainer"), SETTINGS))
        await rollouts.stop.wait()
        begun = [groups for step, groups in rollouts.added if step == stop_in]
        assert len(begun) == 2
        first.cancel()
        await asyncio.wait({first})
        assert not any(name.startswith(f"s{stop_in}.") for name in cluster.trained_episodes)
        rollouts.going_on.set()
        await train(client, cluster.lease("trainer"), SETTINGS)
    assert apart(final_weights(cluster), final_weights(whole)) < 1e-3
    assert len(cluster.trained_episodes) == len(set(cluster.trained_episodes))
    assert sorted(cluster.trained_episodes) == sorted(whole.trained_episodes)


async def test_a_streamed_step_ends_without_dropped_groups_and_without_an_update_if_nothing_teaches(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, **streamed(steps=3)), lambda request: None)

    async def feed_unevenly() -> None:
        for step in range(3):
            await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
            kept = {0: 3, 1: 4, 2: 0}[step]  # groups
            for one in make_trajectories(cluster.run.spec, step, cluster.versions[-1].version):
                if int(one.group_id[-1]) < kept:
                    reward = 0.5 if step == 1 else one.reward
                    cursor = str(len(cluster.trajectories) + 1)
                    cluster.trajectories.append(msgspec.structs.replace(one, cursor=cursor, reward=reward))
                    cluster.counters["submitted"] += 1
            for group in range(kept, 4):
                cluster.emit(RunEvent(kind="group_dropped", key=f"s{step}.g{group}", values={"step": float(step)}))
            cluster.bell()
        await wait_until(lambda: cluster.settled() and len(cluster.named("step")) == 3, timeout=30)
        cluster.finish(RunStatus.FINISHED, "")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed_unevenly())
        tasks.create_task(train(make_client(cluster), cluster.lease("trainer"), SETTINGS))
    told = [event.values for event in cluster.named("step")]
    assert [values["trained"] for values in told] == [9, 12, 0]
    assert ["loss" in values for values in told] == [True, False, False]
    assert torch.equal(cluster.weights[2]["lm_head.weight"], cluster.weights[4]["lm_head.weight"])
