"""What a training learns from, and what it hands over to be published: all of its weights, or what changed in them."""

from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from ebbtide.client.publisher.tensor_snapshots import TensorKeeper, TensorSnapshot
from ebbtide.trainer.learning import gpu_changes
from ebbtide.trainer.learning.local_learning import LocalLearning, compute_dtype
from ebbtide.trainer.learning.network import load_network
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec, Sampling
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


@pytest.mark.parametrize(
    ("wish", "device", "units", "found"),
    [
        ("auto", "cpu", True, "float32"),
        ("auto", "cuda:1", True, "bfloat16"),
        ("auto", "cuda", False, "float32"),
        ("float32", "cuda", True, "float32"),
        ("bfloat16", "cpu", False, "bfloat16"),
    ],
)
def test_a_gpu_with_units_for_it_computes_in_bfloat16_unless_the_run_says_otherwise(
    wish: str, device: str, units: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: units or including_emulation)
    assert compute_dtype(wish, device) == found


@pytest.mark.parametrize(("dtype", "published"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_what_is_published_has_the_dtype_of_computation_and_masters_stay_float32(
    dtype: str, published: torch.dtype, checkpoint: Path
) -> None:
    learning = LocalLearning(make_spec(checkpoint, dtype), source=checkpoint, device="cpu")
    assert {tensor.dtype for _, tensor in learning.tensors()} == {published}
    assert {parameter.dtype for parameter in learning._network.parameters()} == {torch.float32}


class MaskingSampler:
    """Samples as workers do: within the first `least` tokens of a response, none of `ends`."""

    def __init__(self, checkpoint: Path, ends: list[int], least: int) -> None:
        self._network, self._ends, self._least = load_network(checkpoint), ends, least
        self._draw = torch.Generator().manual_seed(0)

    def _response(self, before: list[int], length: int) -> tuple[list[int], list[float]]:
        ids, said = list(before), []
        for place in range(length):
            with torch.no_grad():
                logits = self._network(torch.tensor([ids])).logits[0, -1]
            if place < self._least:
                logits[self._ends] = -torch.inf
            logprobs = logits.log_softmax(-1)
            ids.append(int(torch.multinomial(logprobs.exp(), 1, generator=self._draw)))
            said.append(logprobs[ids[-1]].item())
        return ids[len(before) :], said

    def episode(self, number: int) -> Trajectory:
        """Two responses, with what an environment wrote between them."""
        prompt, between = [3, 4], [11, 12]
        first, of_first = self._response(prompt, 6)
        second, of_second = self._response(prompt + first + between, 7)
        return Trajectory(
            episode_id=f"e{number}",
            group_id="g",
            step=1,
            group_size=4,
            prompt_ids=pack_ids(prompt),
            tokens=pack_tokens(first + between + second, [*of_first, 0.0, 0.0, *of_second], 1),
            loss_mask=b"\x01" * 6 + b"\x00" * 2 + b"\x01" * 7,
            reward=float(number),
        )


def test_end_tokens_that_min_tokens_barred_at_the_worker_leave_no_logprob_gap(checkpoint: Path) -> None:
    network = load_network(checkpoint)
    likely = network(torch.tensor([[3, 4]])).logits[0, -1].topk(2).indices.tolist()
    (checkpoint / "generation_config.json").write_text(f'{{"eos_token_id": {likely[0]}}}')
    sampling = Sampling(min_tokens=4, stop_token_ids=(likely[1],))
    spec = msgspec.structs.replace(make_spec(checkpoint, "float32"), sampling=sampling)
    sampler = MaskingSampler(checkpoint, likely, least=4)
    values = LocalLearning(spec, source=checkpoint, device="cpu").step(
        [sampler.episode(number) for number in range(4)], step=1, steps={1: 0}, version=1
    )
    assert values["logprob_gap"] == pytest.approx(0.0, abs=1e-5)


def test_an_end_token_that_a_spec_names_twice_has_its_gradient_once(checkpoint: Path) -> None:
    likely = load_network(checkpoint)(torch.tensor([[3, 4]])).logits[0, -1].topk(2).indices.tolist()
    (checkpoint / "generation_config.json").write_text(f'{{"eos_token_id": {likely[0]}}}')
    norms = []
    for stops in ((likely[1],), (likely[1], likely[1], likely[0])):
        sampling = Sampling(min_tokens=4, stop_token_ids=stops)
        spec = msgspec.structs.replace(make_spec(checkpoint, "float32"), sampling=sampling)
        sampler = MaskingSampler(checkpoint, likely, least=4)
        learning = LocalLearning(spec, source=checkpoint, device="cpu")
        values = learning.step([sampler.episode(number) for number in range(4)], step=1, steps={1: 0}, version=1)
        norms.append(values["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_nothing_is_kept_where_there_is_no_room(checkpoint: Path) -> None:
    learning = LocalLearning(make_spec(checkpoint, "float32"), source=checkpoint, device="cpu")
    learning.step(trajectories(0), step=0, steps={1: 0}, version=1)
    assert not isinstance(learning.tensors(), TensorKeeper)
