"""A state that left the device comes back bit for bit, warm or cold, and what was changed meanwhile is refused."""

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch

from ebbtide.run_client import RunFailed
from ebbtide.trainer.learning import parked_state
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.parked_state import HostBudget, StateDamaged, StatePark, storages_of
from ebbtide.trainer.learning.trainer_memory import CpuRoom, CudaRoom, TrainerMemory
from tests.unit.trainer.learning.test_learner import recorded, sample, weights
from tests.unit.trainer.learning.tiny_networks import make_network

PLENTY = 1 << 40


def park_in(folder: Path, *, warm_bytes: int = PLENTY) -> StatePark:
    return StatePark(folder / "warm", folder / "cold", warm_bytes=warm_bytes)


def learner_of(network: Network, device: str = "cpu") -> Learner:
    reference = deepcopy(network).requires_grad_(False).to(device)
    settings = LearnerSettings(learning_rate=1e-3, kl_coefficient=0.1)
    return Learner(deepcopy(network).to(device), settings, version=3, reference=reference)


def memory_of(learner: Learner, park: StatePark, device: str = "cpu") -> TrainerMemory:
    room = CpuRoom() if device == "cpu" else CudaRoom(device)
    return TrainerMemory(learner.movable, room, whole=learner.everything, park=park)


@pytest.mark.parametrize("warm_bytes", [PLENTY, 0], ids=["warm", "cold"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 tied"])
def test_a_step_after_a_turn_of_another_trainer_is_the_step_without_one(
    kind: str, device: str, warm_bytes: int, tmp_path: Path
) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    network = make_network(kind)
    samples = [recorded(network, sample(12, 6, advantage=sign, seed=seed)) for seed, sign in enumerate((1.0, -1.0))]
    calm, moved = learner_of(network, device), learner_of(network, device)
    memory = memory_of(moved, park_in(tmp_path, warm_bytes=warm_bytes), device)
    for _ in range(3):
        calm.step(samples, Random(1))
        moved.step(samples, Random(1))
        parked = memory.leave()
        assert parked.warm is bool(warm_bytes)
        assert parked.size >= 4 * sum(one.nbytes for one in moved.network.parameters())
        assert not any(one.untyped_storage().nbytes() for one in moved.everything() if one.dim())
        assert memory.restore() == parked.size
    for one, other in zip(weights(calm.network), weights(moved.network), strict=True):
        assert torch.equal(one, other)


def test_unfinished_gradients_leave_and_come_back_too(network: Network, tmp_path: Path) -> None:
    parts = [[recorded(network, sample(12, 6, advantage=sign, seed=seed))] for seed, sign in enumerate((1.0, -1.0))]
    calm, moved = learner_of(network), learner_of(network)
    memory = memory_of(moved, park_in(tmp_path))
    for part in parts:
        calm.accumulate(part)
        moved.accumulate(part)
        assert memory.leave().size >= 3 * sum(one.nbytes for one in moved.network.parameters())
        memory.restore()
    calm.update()
    moved.update()
    for one, other in zip(weights(calm.network), weights(moved.network), strict=True):
        assert torch.equal(one, other)


def test_leaving_twice_and_coming_back_twice_is_once(network: Network, tmp_path: Path) -> None:
    learner = learner_of(network)
    memory = memory_of(learner, park_in(tmp_path))
    before = [one.clone() for one in weights(learner.network)]
    assert memory.leave().size
    assert memory.leave().size == 0
    assert memory.restore()
    assert memory.restore() == 0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(learner.network), strict=True))


def test_tensors_that_were_mapped_from_a_file_can_leave_and_their_views_stay_views(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(range(64)))
    whole = torch.from_file(str(path), size=64, dtype=torch.uint8)
    part = whole[16:32]
    storages = storages_of([whole, part])
    assert len(storages) == 1
    park = park_in(tmp_path)
    park.park(storages)
    assert park.bring_back() == 64
    assert whole.tolist() == list(range(64))
    whole[16] = 99
    assert part[0] == 99
    assert path.read_bytes()[16] == 16


def test_a_state_that_cannot_come_back_now_leaves_nothing_on_the_device_and_comes_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: parked_state.FileCopy, storages: object) -> None:
        raise MemoryError

    tensors, park = [torch.arange(1 << 10), torch.arange(1 << 12)], park_in(tmp_path)
    park.park(storages_of(tensors))
    with monkeypatch.context() as patched:
        patched.setattr(parked_state.FileCopy, "read_into", full)
        with pytest.raises(MemoryError):
            park.bring_back()
    assert park.taken
    assert not any(one.untyped_storage().nbytes() for one in tensors)
    park.bring_back()
    assert [one.tolist() for one in tensors] == [list(range(1 << 10)), list(range(1 << 12))]


def open_files(folder: Path) -> list[Path]:
    """This process's open files in the folder, which may have no name."""
    fds = Path("/proc/self/fd").iterdir()
    return [fd for fd in fds if fd.is_symlink() and str(fd.readlink()).startswith(f"{folder}/")]


@pytest.mark.parametrize("change", ["other bytes", "shorter"])
def test_a_state_that_was_changed_outside_is_refused(change: str, tmp_path: Path) -> None:
    tensor = torch.arange(1 << 16)
    park = park_in(tmp_path, warm_bytes=0)
    park.park(storages_of([tensor]))
    (file,) = open_files(tmp_path / "cold")
    with file.open("r+b") as writer:
        if change == "shorter":
            writer.truncate(1 << 15)
        else:
            writer.seek(4711)
            writer.write(b"\xff")
    with pytest.raises(StateDamaged):
        park.bring_back()


def test_files_are_this_users_alone_and_have_no_name_that_could_stay_behind(tmp_path: Path) -> None:
    tensor, park = torch.arange(1 << 16), park_in(tmp_path)
    park.park(storages_of([tensor]))
    names = [path.name for path in (tmp_path / "warm").iterdir()]
    assert sorted(re.sub(r"^.*\.", "*.", name) for name in names) == ["*.lock", "*.warm"]
    (state,) = (file for file in open_files(tmp_path / "warm") if "(deleted)" in str(file.readlink()))
    assert state.stat().st_size == tensor.nbytes
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in open_files(tmp_path / "warm"))
    park.close()
    assert [path.name for path in (tmp_path / "warm").iterdir()] == ["warm.lock"]


def test_a_state_beyond_the_hosts_budget_is_cold_until_another_trainer_has_taken_its_own_back(tmp_path: Path) -> None:
    first, second = torch.arange(1 << 16), torch.arange(1 << 16)
    one, other = (park_in(tmp_path, warm_bytes=first.nbytes + 1) for _ in range(2))
    assert one.park(storages_of([first])).warm
    assert not other.park(storages_of([second])).warm
    one.bring_back()
    other.bring_back()
    assert other.park(storages_of([second])).warm


def test_the_reservation_of_a_trainer_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from ebbtide.trainer.learning.parked_state import HostBudget\n"
        "budget = HostBudget(pathlib.Path(sys.argv[1]), 100); print(budget.reserve(80), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        budget = HostBudget(tmp_path, 100)
        assert not budget.reserve(80)
        holder.kill()
        holder.wait()
        assert budget.reserve(80)


def make_it_a_file(warm: Path) -> None:
    warm.write_text("no folder")


def lock_it(warm: Path) -> None:
    warm.mkdir()
    lock = os.open(warm / "warm.lock", os.O_RDWR | os.O_CREAT)  # closed by nobody, as by a trainer that is frozen
    fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.parametrize("fault", [make_it_a_file, lock_it])
def test_a_state_for_which_host_memory_cannot_be_used_is_cold(
    fault: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked_state, "_LOCKED_S", 0.05)
    fault(tmp_path / "warm")
    tensor, park = torch.arange(1 << 10), park_in(tmp_path)
    assert not park.park(storages_of([tensor])).warm
    park.bring_back()
    assert tensor.tolist() == list(range(1 << 10))


def test_a_state_without_any_room_stays_where_it_is(network: Network, tmp_path: Path) -> None:
    learner = learner_of(network)
    before = [one.clone() for one in weights(learner.network)]
    (tmp_path / "cold").write_text("no folder")
    memory = memory_of(learner, park_in(tmp_path, warm_bytes=0))
    with pytest.raises(RunFailed, match="warm_mib"):
        memory.leave()
    assert all(torch.equal(one, other) for one, other in zip(before, weights(learner.network), strict=True))
