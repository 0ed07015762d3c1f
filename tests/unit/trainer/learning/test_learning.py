"""What a training hands over to be published: all of its weights, or what changed in those that it keeps."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from ebbtide.client.publisher.tensor_snapshots import TensorKeeper, TensorSnapshot
from ebbtide.trainer.learning import gpu_changes
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec
from ebbtide.types.tokens import pack_ids, pack_tokens
from ebbtide.weights.version_encoding import Described, Encoding


def make_spec(model: Path, dtype: str) -> RunSpec:
    trainer = {"steps": 9, "learning_rate": 1e-4, "dtype": dtype}
    environment = {"name": "reasoning_gym"}
    spec = {"name": "run", "model": str(model), "environment": environment, "trainer": trainer}
    return msgspec.convert(spec, RunSpec)


def trajectories(step: int) -> list[Trajectory]:
    draw = Random(step)
    tokens = [[draw.randrange(5, 90) for _ in range(6)] for _ in range(4)]
    return [
        Trajectory(
            episode_id=f"{step}.{sample}",
            group_id=str(step),
            step=step,
            group_size=len(tokens),
            prompt_ids=pack_ids([3, 4]),
            tokens=pack_tokens(ids, [-4.5] * len(ids), 1),
            loss_mask=b"\x01" * len(ids),
            reward=draw.random(),
        )
        for sample, ids in enumerate(tokens)
    ]


def publish(
    snapshot: TensorSnapshot, learning: LocalLearning, base: TensorSnapshot, described: Described | None
) -> Encoding:
    snapshot.follow(base.give_up())
    snapshot.take(learning.tensors())
    encoding = Encoding(snapshot.tensors, described, found=snapshot.fetch())
    encoding.work()
    return encoding


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_kept_once_a_step_was_trained_publishes_what_copies_do(
    dtype: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_changes, "has_room", lambda tensors, device: len(list(tensors)) > 0)
    spec, described = make_spec(checkpoint, dtype), None
    learnings = [LocalLearning(spec, source=checkpoint, device="cpu", keep_published=keep) for keep in (True, False)]
    snapshots = [[TensorSnapshot(), TensorSnapshot()] for _ in learnings]
    for step in range(4):
        assert [isinstance(one.tensors(), TensorKeeper) for one in learnings] == [step > 0, False]
        kept, copied = (
            publish(own[step % 2], one, own[1 - step % 2], described)
            for one, own in zip(learnings, snapshots, strict=True)
        )
        assert kept.result() == copied.result()
        ours, theirs = (own[step % 2].tensors for own in snapshots)
        assert [(one.name, bytes(one.data)) for one in ours] == [(one.name, bytes(one.data)) for one in theirs]
        described = Described(theirs, copied.result().entries)
        for one in learnings:
            one.step(trajectories(step), step=step, steps={1: step}, version=1)
    assert 0 < kept.result().changed <= kept.result().elements


def test_nothing_is_kept_where_there_is_no_room(checkpoint: Path) -> None:
    learning = LocalLearning(make_spec(checkpoint, "float32"), source=checkpoint, device="cpu")
    learning.step(trajectories(0), step=0, steps={1: 0}, version=1)
    assert not isinstance(learning.tensors(), TensorKeeper)
