"""Runs for tests of the training loop: what they are fed, and what their cluster in memory then has."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import torch

from ebbtide.trainer.service import train
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec, RunStatus
from ebbtide.types.tokens import pack_ids, pack_tokens
from tests.support.waiting import wait_until

SETTINGS = TrainerSettings(device="cpu", threads=1, output_roots=("/",), allowed_trainers=("*",))
DEEDS = ("trainer:publish", "trainer:announce", "trainer:report", "trainer:commit")


def make_spec(model: Path, output: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "run",
        "model": str(model),
        "output": str(output),
        "environment": {"name": "reasoning_gym"},
        "batch": {"groups_per_step": 2, "group_size": 3},
        "trainer": {"steps": 4, "learning_rate": 1e-2, "checkpoint_every": 2, "minibatches": 2, "warmup_steps": 3},
    }
    for name, value in changes.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return msgspec.convert(base, RunSpec)


def make_trajectories(spec: RunSpec, step: int, version: int) -> list[Trajectory]:
    """The same for the same step; they arrive in another order for every version."""
    rng, made = random.Random(step), []
    for group in range(spec.batch.groups_per_step):
        for sample in range(spec.batch.group_size):
            ids = [rng.randrange(5, 90) for _ in range(rng.randrange(3, 9))]
            made.append(
                Trajectory(
                    episode_id=f"s{step}.g{group}.{sample}",
                    group_id=f"s{step}.g{group}",
                    step=step,
                    group_size=spec.batch.group_size,
                    prompt_ids=pack_ids([3, 10 + group, 4]),
                    tokens=pack_tokens(ids, [-4.5] * len(ids), version),
                    loss_mask=b"\x01" * len(ids),
                    reward=rng.random(),
                    metrics={"right": 1.0, "asked": 2.0},
                )
            )
    random.Random(version).shuffle(made)
    return made


async def feed(cluster: Any) -> None:
    """Stands for driver and workers: trajectories for each announced version, and the run's end once all is told."""
    spec: RunSpec = cluster.run.spec
    for step in range(spec.trainer.steps):
        await wait_until(lambda: max((version.step for version in cluster.versions), default=-1) >= step)  # noqa: B023
        version = next(version.version for version in cluster.versions if version.step == step)
        made = make_trajectories(spec, step, version)
        for trajectory in made:
            cursor = str(len(cluster.trajectories) + 1)
            cluster.trajectories.append(msgspec.structs.replace(trajectory, cursor=cursor))
        cluster.counters["submitted"] += len(made)
        cluster.bell()
    await wait_until(lambda: cluster.settled() and cluster.versions[-1].step == spec.trainer.steps, timeout=30)
    cluster.finish(RunStatus.FINISHED, "")


async def feed_sessions(cluster: Any) -> None:
    """Stands for agents: sessions of two branches, one more in each group than it has, as soon as there are weights."""
    spec: RunSpec = cluster.run.spec
    await wait_until(lambda: bool(cluster.versions))
    for step in range(spec.trainer.steps + 1):
        wanted = min(step, spec.trainer.steps - 1)
        await wait_until(lambda: max(version.step for version in cluster.versions) >= wanted)  # noqa: B023
        made = make_trajectories(spec, step, max(version.version for version in cluster.versions))
        extra = msgspec.structs.replace(made[0], episode_id=f"s{step}.extra")
        for one in (*made, extra):
            for branch in range(2):
                name, cursor = f"{one.episode_id}.{branch}", str(len(cluster.trajectories) + 1)
                changes = {"episode_id": name, "cursor": cursor, "session_id": one.episode_id, "branches": 2}
                cluster.trajectories.append(msgspec.structs.replace(one, **changes))
                cluster.counters["submitted"] += 1
        cluster.bell()


async def train_to_end(cluster: Any, client: Any) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(client, cluster.lease("trainer"), SETTINGS))


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the weight that differs most: the relative L2 distance."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - one).norm() / one.norm()) for name, one in theirs.items())


def final_weights(cluster: Any) -> dict[str, torch.Tensor]:
    last = next(version for version in cluster.versions if version.step == cluster.run.spec.trainer.steps)
    weights: dict[str, torch.Tensor] = cluster.weights[last.version]
    return weights


def deeds(cluster: Any) -> int:
    return sum(deed.startswith(DEEDS) for deed in cluster.log)


def reached(cluster: Any, trainer: "asyncio.Task[None]", count: int) -> bool:
    return trainer.done() or deeds(cluster) >= count
