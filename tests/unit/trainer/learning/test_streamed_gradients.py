"""Gradients that are streamed equal those of the whole batch, in whichever order and parts the groups come."""

import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.training_batches import TrainingSample, samples_of
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import TrainerSpec
from ebbtide.types.tokens import pack_ids, pack_tokens

#: Of the norm of the difference to the norm of the gradient, in float32.
TOLERANCE = 1e-5
VERSION = 3
GROUPS, SIZE = 12, 4
#: Where there is a GPU, on it, too.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
    ),
]

log = logging.getLogger(__name__)  # what was measured: --log-cli-level=info


def trajectories(seed: int = 0) -> list[list[Trajectory]]:
    """Groups of uneven lengths, some tokens of older versions, and one group that teaches nothing."""
    draw, groups = Random(seed), []
    for group in range(GROUPS):
        members = []
        for sample in range(SIZE):
            ids = [draw.randrange(5, 90) for _ in range(draw.randrange(2, 60))]
            versions = [VERSION - draw.randrange(3)] * (len(ids) // 2)
            said = [-draw.uniform(1.0, 7.0) for _ in ids]
            members.append(
                Trajectory(
                    episode_id=f"g{group}.{sample}",
                    group_id=f"g{group}",
                    step=0,
                    group_size=SIZE,
                    prompt_ids=pack_ids([3, 10 + group, 4]),
                    tokens=pack_tokens(ids, said, versions + [VERSION] * (len(ids) - len(versions))),
                    loss_mask=bytes(draw.randrange(4) > 0 for _ in ids[1:]) + b"\x01",
                    reward=1.0 if group == 5 else draw.random(),
                )
            )
        groups.append(members)
    return groups


def samples(groups: list[list[Trajectory]], **spec: Any) -> list[TrainingSample]:
    return samples_of([one for group in groups for one in group], TrainerSpec(**spec), seed=7, step=2)


def make_learner(network: Network, *, micro_batch_tokens: int = 200, max_grad_norm: float = 1e9) -> Learner:
    settings = LearnerSettings(
        learning_rate=1e-3, micro_batch_tokens=micro_batch_tokens, max_grad_norm=max_grad_norm, warmup_steps=3
    )
    return Learner(deepcopy(network), settings, version=VERSION)


def portions(groups: list[list[Trajectory]], draw: Random) -> Iterator[list[list[Trajectory]]]:
    """All groups, in a random order, one or several at once."""
    order = draw.sample(groups, len(groups))
    while order:
        count = draw.randint(1, 4)
        yield order[:count]
        order = order[count:]


def gradient(learner: Learner) -> Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in learner.network.parameters()])


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def stream(learner: Learner, groups: list[list[Trajectory]], seed: int, **spec: Any) -> dict[str, float | None]:
    for portion in portions(groups, Random(seed)):
        if found := samples(portion, **spec):
            learner.accumulate(found)
    return asdict(learner.update())


@pytest.mark.parametrize("device", DEVICES)
def test_streamed_gradients_equal_those_of_the_whole_batch_in_any_order_and_parts(
    device: str, network: Network
) -> None:
    network = network.to(device)
    groups, whole = trajectories(), make_learner(network)
    told = asdict(whole.step(samples(groups), Random(0)))
    errors = []
    for seed in range(12):
        streamed = make_learner(network, micro_batch_tokens=(1, 90, 200, 100_000)[seed % 4])
        found = stream(streamed, groups, seed)
        errors.append(apart(gradient(streamed), gradient(whole)))
        assert found == pytest.approx(told, rel=1e-4, abs=1e-6)
    log.info("relative error of the gradient, %s, 12 orders: at most %.2e", device, max(errors))
    assert max(errors) <= TOLERANCE
    assert told["stale_tokens"] > 0
    assert told["importance_weight"] != pytest.approx(1.0, abs=1e-3)


def test_gradients_are_clipped_after_they_were_divided(network: Network) -> None:
    groups = trajectories()
    free, whole, streamed = (make_learner(network, max_grad_norm=norm) for norm in (1e9, 0.01, 0.01))
    norm = free.step(samples(groups), Random(0)).grad_norm
    assert norm > 0.1
    assert whole.step(samples(groups), Random(0)).grad_norm == pytest.approx(norm)
    assert stream(streamed, groups, 1)["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert gradient(streamed).norm() == pytest.approx(0.01, rel=1e-3)
    assert apart(gradient(streamed), gradient(whole)) <= TOLERANCE


def test_permuted_rewards_are_the_same_however_groups_come(network: Network) -> None:
    groups, whole, streamed = trajectories(), make_learner(network), make_learner(network)
    whole.step(samples(groups, permute_rewards=True), Random(0))
    stream(streamed, groups, 3, permute_rewards=True)
    assert apart(gradient(streamed), gradient(whole)) <= TOLERANCE
    plain = make_learner(network)
    plain.step(samples(groups), Random(0))
    assert apart(gradient(plain), gradient(whole)) > 0.1


def test_each_update_begins_without_the_gradients_of_the_one_before(network: Network) -> None:
    whole, streamed = make_learner(network), make_learner(network)
    for number in range(3):
        groups = trajectories(number)
        whole.step(samples(groups), Random(0))
        stream(streamed, groups, number)
    pairs = list(zip(streamed.network.parameters(), whole.network.parameters(), strict=True))
    assert max(apart(ours.detach(), theirs.detach()) for ours, theirs in pairs) < 1e-4
    assert streamed.state_dict()["scheduler"] == whole.state_dict()["scheduler"]


def test_a_normaliser_of_each_part_would_not_pass_for_that_of_the_batch(network: Network) -> None:
    """The error that the tolerance must catch: parts divided by their own tokens, then averaged."""
    groups, whole = trajectories(), make_learner(network)
    whole.step(samples(groups), Random(0))
    mean = np.zeros(gradient(whole).shape)
    parts = [found for portion in portions(groups, Random(1)) if (found := samples(portion))]
    for part in parts:
        learner = make_learner(network)
        learner.step(part, Random(0))
        mean += gradient(learner).numpy() / len(parts)
    assert apart(torch.from_numpy(mean), gradient(whole)) > 100 * TOLERANCE
