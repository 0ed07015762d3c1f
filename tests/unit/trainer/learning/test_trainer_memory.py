"""What a trainer moves off its device comes back bit for bit, and a step does not know that it was away."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from random import Random

import pytest
import torch
from torch import Tensor

from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.trainer_memory import CudaRoom, TrainerMemory
from tests.unit.trainer.learning.test_learner import recorded, sample, weights

GIB = 1 << 30


class PretendedGpu(CudaRoom):
    """A device that is this process's memory; storage on it is known by its address."""

    def __init__(self, free: int = GIB, host_free: int = 64 * GIB) -> None:
        self.free, self.host_free = free, host_free
        self.host: dict[int, Tensor] = {}  # address -> storage that is not on the device
        self.allocated = 0

    def holds(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() not in self.host

    def trim(self) -> None:
        """It keeps nothing for later."""

    def memory(self) -> tuple[int, int, int, int]:
        return self.free, 80 * GIB, self.host_free, 128 * GIB

    def to_host(self, tensor: Tensor, former: Tensor | None) -> Tensor:
        if former is None:
            former, self.allocated = torch.empty_like(tensor), self.allocated + 1
        self.host[former.data_ptr()] = former
        return former.copy_(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def settle(self) -> None:
        """Copies are done when they return."""


@pytest.fixture(params=["pretended", "cuda"])
def place(request: pytest.FixtureRequest) -> tuple[str, Callable[[], CudaRoom]]:
    if request.param == "pretended":
        return "cpu", PretendedGpu
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    return "cuda", lambda: CudaRoom("cuda:0")


def learner_on(device: str, network: Network) -> Learner:
    reference = deepcopy(network).requires_grad_(False).to(device)
    settings = LearnerSettings(learning_rate=1e-3, kl_coefficient=0.1)
    return Learner(deepcopy(network).to(device), settings, version=3, reference=reference)


def test_a_step_after_a_loan_is_the_step_without_one(
    place: tuple[str, Callable[[], CudaRoom]], network: Network
) -> None:
    device, make_room = place
    samples = [recorded(network, sample(12, 6, advantage=sign, seed=seed)) for seed, sign in enumerate((1.0, -1.0))]
    calm, lent = learner_on(device, network), learner_on(device, network)
    room = make_room()
    memory = TrainerMemory(lent.movable, room)
    needed = 10**15  # no device has room for it
    for _ in range(3):
        calm.step(samples, Random(1))
        lent.step(samples, Random(1))
        moved = memory.give_up(needed)
        assert moved >= 3 * sum(one.nbytes for one in lent.network.parameters())
        assert not any(room.holds(one) for one in lent.movable() if one.dim())
        assert memory.restore() == moved
        assert all(map(room.holds, lent.movable())) or device == "cuda"
    for one, other in zip(weights(calm.network), weights(lent.network), strict=True):
        assert torch.equal(one, other)
    if isinstance(room, PretendedGpu):
        assert room.allocated == len(list(lent.movable())), "host memory is used again"


def test_gradients_that_are_not_used_up_go_and_come_back_too(network: Network) -> None:
    parts = [[recorded(network, sample(12, 6, advantage=sign, seed=seed))] for seed, sign in enumerate((1.0, -1.0))]
    calm, lent = learner_on("cpu", network), learner_on("cpu", network)
    memory = TrainerMemory(lent.movable, PretendedGpu())
    for part in parts:
        calm.accumulate(part)
        lent.accumulate(part)
        assert memory.give_up(10**15) >= sum(one.nbytes for one in lent.network.parameters())
        memory.restore()
    calm.update()
    lent.update()
    for one, other in zip(weights(calm.network), weights(lent.network), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_were_away_are_freed_by_the_next_step(network: Network) -> None:
    learner, room = learner_on("cpu", network), PretendedGpu()
    memory = TrainerMemory(learner.movable, room)
    samples = [recorded(learner.network, sample(12, 6, advantage=1.0))]
    learner.accumulate(samples)
    gradients = [weakref.ref(one.grad) for one in learner.network.parameters() if one.grad is not None]
    memory.give_up(10**15)
    memory.restore()
    assert gradients
    assert all(gradient() is not None for gradient in gradients)
    learner.update()
    learner.accumulate(samples)
    gc.collect()
    assert not any(gradient() is not None for gradient in gradients)


def test_the_optimisers_state_can_be_read_while_it_is_away(network: Network) -> None:
    lent = learner_on("cpu", network)
    lent.step([recorded(network, sample(12, 6))], Random(1))
    before = deepcopy(lent.state_dict()["optimizer"]["state"])
    memory = TrainerMemory(lent.movable, PretendedGpu())
    assert memory.give_up(10**15)
    after = lent.state_dict()["optimizer"]["state"]
    for number, state in before.items():
        for name, value in state.items():
            assert torch.equal(value, after[number][name])


@pytest.mark.parametrize(
    ("needed", "room", "moves"),
    [
        pytest.param(0, PretendedGpu(), False, id="no-engine-needs-any"),
        pytest.param(4 * GIB, PretendedGpu(free=10 * GIB), False, id="both-fit"),
        pytest.param(4 * GIB, PretendedGpu(free=5 * GIB), True, id="an-engine-lacks-room"),
        pytest.param(4 * GIB, PretendedGpu(free=5 * GIB, host_free=GIB), False, id="the-host-lacks-room"),
    ],
)
def test_memory_moves_only_if_an_engine_lacks_room_and_the_host_has_it(
    network: Network, needed: int, room: PretendedGpu, moves: bool
) -> None:
    lent = learner_on("cpu", network)
    lent.step([recorded(network, sample(12, 6))], Random(1))
    memory = TrainerMemory(lent.movable, room)
    assert bool(memory.give_up(needed)) is moves
    assert bool(memory.lacking(needed)) is (needed + 0.03 * 80 * GIB > room.free and needed > 0)
    assert bool(memory.restore()) is moves
