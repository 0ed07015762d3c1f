"""Trainings on fixed trajectories, on one rank or on several: what these compute must not depend on it.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... python fixed_training.py JOBS

JOBS: a JSON file with a list of jobs, done one after another by all ranks. Files beside it: the rank that leads
writes what it was told (.told), and each what it holds in the end (.held and its number).
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import load_file

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.client.publisher.publisher import Authority, Publisher
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.client.relay_client import RelayClient
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning import learner
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.parked_state import park_of
from ebbtide.trainer.learning.sampled_logprobs import CHUNK_LOGITS
from ebbtide.trainer.ranks.rank_group import RankFollower, RankGroup, RankZeroLearning
from ebbtide.trainer.ranks.rank_launcher import place_of
from ebbtide.trainer.ranks.rank_world import RankWorld
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.trainer.training_checkpoint import TrainingState
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec
from ebbtide.types.tokens import pack_ids, pack_tokens
from ebbtide.types.weights import PolicyVersion
from tests.support.waiting import wait_until

RUN = "fixed"
TOKEN = "a-token-of-tests"
SEED = bytes(range(32))


class Job(Struct, frozen=True, kw_only=True):
    """Train `steps` (from, to), from the model or from a `checkpoint`; write one into `folder` after each of `saves`.
    With a `relay`, publish the weights of the end there, as the next version of `run`. `fails`: it cannot be loaded.
    `order`: stream each step's groups, in an order and in parts that it seeds. `parks`: the state leaves the device and
    comes back after each step."""

    spec: RunSpec
    folder: str
    steps: tuple[int, int]
    saves: tuple[int, ...]
    checkpoint: str = ""
    relay: str = ""
    run: str = RUN
    device: str = "cpu"
    fails: bool = False
    groups: int = 3  # of a step
    order: int | None = None
    offload: bool = False
    parks: bool = False
    chunk_logits: int = CHUNK_LOGITS  # that the head computes at once; of several jobs, the first one's


class Held(Struct, frozen=True, kw_only=True):
    """What a rank has: process groups of torch, publishers, and snapshots with weights in them."""

    groups: int
    publishers: int
    snapshots: int


def make_spec(model: Path, **trainer: Any) -> RunSpec:
    """Several minibatches and micro-batches of uneven lengths, a KL term, and a learning rate that rises."""
    settings: dict[str, Any] = {
        "steps": 100,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "minibatches": 2,
        "micro_batch_tokens": 40,
        "kl_coefficient": 0.1,
    }
    environment = {"name": "reasoning_gym"}
    spec = {"name": "run", "model": str(model), "environment": environment, "trainer": settings | trainer}
    return msgspec.convert(spec, RunSpec)


def make_trajectories(step: int, groups: int = 3) -> list[Trajectory]:
    """Some tokens are of the version before, and some groups larger and longer than others."""
    draw, made = random.Random(step), []
    for group in range(groups):
        for sample in range(draw.choice((3, 4))):
            ids = [draw.randrange(5, 90) for _ in range(draw.randrange(3, 24))]
            made.append(
                Trajectory(
                    episode_id=f"s{step}.g{group}.{sample}",
                    group_id=f"s{step}.g{group}",
                    step=step,
                    group_size=4,
                    prompt_ids=pack_ids([3, 10 + group, 4]),
                    tokens=pack_tokens(ids, [-4.5] * len(ids), step + 1 if sample else max(step, 1)),
                    loss_mask=b"\x01" * len(ids),
                    reward=draw.random(),
                )
            )
    return made


def parts(trajectories: list[Trajectory], draw: random.Random) -> Iterator[list[Trajectory]]:
    """All groups in a random order, up to three at once."""
    names = list(dict.fromkeys(one.group_id for one in trajectories))
    draw.shuffle(names)
    while names:
        count = draw.randint(1, 3)
        yield [one for one in trajectories if one.group_id in names[:count]]
        names = names[count:]


def train(learning: LocalLearning, job: Job) -> list[dict[str, float]]:
    """What each step reported."""
    if job.checkpoint:
        learning.resume(Path(job.checkpoint), run_id=RUN)
    told = []
    for step in range(*job.steps):
        steps = {version: version - 1 for version in range(1, step + 2)}
        trajectories = make_trajectories(step, job.groups)
        if job.order is None:
            told.append(learning.step(trajectories, step=step, steps=steps, version=step + 1))
        else:
            for part in parts(trajectories, random.Random(f"{job.order}/{step}")):
                learning.add_groups(part, step=step, version=step + 1)
            told.append(learning.finish_step(trajectories, step=step, steps=steps))
        if job.parks:
            assert learning.leave_device().size
            learning.restore_memory()
        if step + 1 in job.saves:
            state = TrainingState(run_id=RUN, lineage=f"l{step}", step=step + 1, version=step + 2)
            learning.checkpoint(Path(job.folder), state, keep=99)
    return told


def alone(job: Job) -> list[dict[str, float]]:
    """The job in this process."""
    source = Path(job.checkpoint or job.spec.model)
    return train(LocalLearning(job.spec, source=source, device=job.device, offload=job.offload), job)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, however many files they lie in."""
    return {name: one for path in sorted(checkpoint.glob("*.safetensors")) for name, one in load_file(path).items()}


def sharing(job: Job) -> TrainerSettings:
    """Of a trainer whose ranks park their states beside the job's folder."""
    folder = Path(job.folder).parent / "parked"
    return TrainerSettings(warm_dir=str(folder / "warm"), cold_dir=str(folder / "cold"))


async def publish(learning: LocalLearning, job: Job) -> None:
    """As rank 0 of a trainer does, without a coordinator."""
    numbers = iter((1,))

    async def reserve() -> tuple[int, bytes]:
        return next(numbers), SEED

    async def announce(version: PolicyVersion) -> None:
        """Nobody waits for it."""

    peer = ServicePeer("weight-relay", job.relay, ClientSecurity(token=TOKEN), patience_s=10.0)
    exchange = await asyncio.to_thread(learning.exchange)
    publisher = RelayClient(peer).publisher(
        job.run, "policy", authority=Authority(reserve, announce), exchange=exchange
    )
    await (await publisher.publish(learning.tensors(), step=job.steps[1]))
    await publisher.aclose()
    await peer.close()


async def lead(world: RankWorld, jobs: list[Job]) -> list[list[dict[str, float]]]:
    crew = await asyncio.to_thread(RankGroup, world)
    told = []
    for job in jobs:
        source = Path(job.checkpoint or job.spec.model)
        park = park_of(sharing(jobs[0])) if job.parks else None
        try:
            learning = await asyncio.to_thread(
                RankZeroLearning, crew, job.spec, run_id=job.run, source=source, offload=job.offload, park=park
            )
        except InvalidRequest:
            if not job.fails:
                raise
            continue
        told.append(await asyncio.to_thread(train, learning, job))
        if job.relay:
            await publish(learning, job)
    await asyncio.to_thread(crew.over)
    return told


def held() -> Held:
    gc.collect()
    objects = gc.get_objects()
    return Held(
        groups=len(torch.distributed.distributed_c10d._world.pg_map),
        publishers=sum(type(one) is Publisher for one in objects),
        snapshots=sum(type(one) is TensorSnapshot and bool(one.room) for one in objects),
    )


async def main(file: Path) -> None:
    jobs = msgspec.json.decode(await asyncio.to_thread(file.read_bytes), type=list[Job])
    learner.CHUNK_LOGITS = jobs[0].chunk_logits  # type: ignore[attr-defined]
    place = place_of(os.environ, 1)
    assert place is not None
    torch.set_num_threads(1)
    world = await asyncio.to_thread(RankWorld, place, jobs[0].device)
    if place.rank == 0:
        file.with_suffix(".told").write_text(json.dumps(await lead(world, jobs)))
        file.with_suffix(".held0").write_bytes(msgspec.json.encode(held()))
        return
    async with Client(relay=jobs[-1].relay or None, security=ClientSecurity(token=TOKEN)) as client:
        follower = RankFollower(world, client, sharing(jobs[0]))  # named, as what it has is counted
        await follower.run()
        with contextlib.suppress(TimeoutError):  # the calls that a publisher had under way let go of it a moment later
            await wait_until(lambda: held().publishers <= 1)
        file.with_suffix(f".held{place.rank}").write_bytes(msgspec.json.encode(held()))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)
