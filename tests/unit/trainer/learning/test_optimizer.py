"""The optimiser computes the same wherever its moments lie, and its rate is the one that was planned."""

from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch

from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning import optimizer
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.optimizer import rate_factor
from ebbtide.trainer.training_checkpoint import TrainingState
from tests.unit.trainer.learning.test_learner import recorded, sample, weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def learner(network: Network, **settings: object) -> Learner:
    made = {"learning_rate": 1e-3, "warmup_steps": 1, "weight_decay": 0.1, **settings}
    return Learner(deepcopy(network), LearnerSettings(**made), version=3)  # type: ignore[arg-type]


def steps(one: Learner, network: Network, numbers: range) -> list[float]:
    rates = []
    for number in numbers:
        samples = [recorded(network, sample(12, 6, advantage=sign, seed=number)) for sign in (1.0, -1.0)]
        samples[1].logprobs[0] -= 0.25
        rates.append(one.step(samples, Random(number)).learning_rate)
    return rates


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [64, 1 << 24])
def test_moments_in_host_memory_change_no_weight(
    network: Network, monkeypatch: pytest.MonkeyPatch, piece: int, device: str
) -> None:
    monkeypatch.setattr(optimizer, "PIECE", piece)
    there = network.to(device)
    plain, offloaded = learner(there), learner(there, offload=True)
    steps(plain, network, range(4)), steps(offloaded, network, range(4))
    moved = [(a - b).abs().max().item() for a, b in zip(weights(plain.network), weights(network), strict=True)]
    assert min(moved) > 1e-4
    for ours, theirs in zip(weights(offloaded.network), weights(plain.network), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)
    assert {one.device.type for one in offloaded.movable() if one.dim()} <= {"cpu", device}
    states = offloaded.state_dict()["optimizer"]["state"].values()
    assert {value.device.type for state in states for value in state.values()} == {"cpu"}


def test_the_fused_update_is_adamw_to_the_rounding(network: Network) -> None:
    fused, plain = learner(network), deepcopy(network)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, foreach=False)
    optimizer_ = fused._optimizer
    for group in optimizer_.param_groups:
        group["lr"] = 1e-3
    for number in range(5):
        torch.manual_seed(number)
        for ours, theirs in zip(fused.network.parameters(), plain.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        optimizer_.step()
        reference.step()
    for one, other in zip(weights(fused.network), weights(plain), strict=True):
        assert torch.allclose(one, other, atol=5e-7)


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_run_resumes_wherever_its_moments_lay(network: Network, tmp_path: Path, before: bool, after: bool) -> None:
    plan = {"schedule": "cosine", "steps": 8}
    whole, first = learner(network, **plan), learner(network, offload=before, **plan)
    rates = steps(whole, network, range(6))
    steps(first, network, range(3))
    state = TrainingState(run_id="run", lineage="l", step=3, version=3)
    path = training_checkpoint.write(tmp_path, first.network, character_tokenizer(), first.state_dict(), state)
    second = learner(first.network, offload=after, **plan)
    _, found = training_checkpoint.read_state(
        path, run_id="run", parameters=list(second.network.parameters()), in_host=after
    )
    second.load_state_dict(found)
    assert steps(second, network, range(3, 6)) == rates[3:]
    for ours, theirs in zip(weights(second.network), weights(whole.network), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_state_of_an_optimiser_that_was_not_fused_is_taken_into_one_that_is(network: Network) -> None:
    one = learner(network)
    steps(one, network, range(1))
    state = deepcopy(one.state_dict())
    for group in state["optimizer"]["param_groups"]:
        group |= {"fused": None, "foreach": True}
    other = learner(one.network)
    other.load_state_dict(state)
    assert {group["fused"] for group in other.state_dict()["optimizer"]["param_groups"]} == {True}
    steps(other, network, range(1, 2)), steps(one, network, range(1, 2))
    assert all(map(torch.equal, weights(other.network), weights(one.network)))


def test_the_rate_rises_and_then_stays_or_falls_to_the_end() -> None:
    def rates(schedule: str, warmup: int = 4) -> list[float]:
        return [rate_factor(n, schedule, warmup_steps=warmup, steps=12) for n in range(13)]  # type: ignore[arg-type]

    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates("constant")[5:] == [1.0] * 8
    assert rates("linear")[5:] == pytest.approx([7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    cosine = rates("cosine")
    assert cosine[8] == pytest.approx(0.5)
    assert cosine[6] == pytest.approx((2 + 2**0.5) / 4)
    assert cosine[12] == pytest.approx(0.0)
    assert rates("cosine", 0)[0] == 1.0
    assert rates("linear", 20)[12] == pytest.approx(13 / 21)  # a warm-up that outlasts the run
