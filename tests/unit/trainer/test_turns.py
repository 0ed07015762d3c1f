"""A run that takes turns has its device for each step alone, and its weights are those of one that has it for ever."""

import asyncio
import time
from pathlib import Path
from threading import Event
from typing import Any, Self

import pytest
import torch
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed
from ebbtide.trainer import training
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.lending import turn_loan
from ebbtide.trainer.lending.device_loan import OwnDevice
from ebbtide.trainer.lending.turn_loan import TurnLoan
from ebbtide.trainer.service import check_trainable, train
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import check_spec
from tests.support.waiting import wait_until
from tests.unit.trainer.test_lending import lease_of
from tests.unit.trainer.trained_runs import SETTINGS, apart, feed, final_weights, make_spec, train_to_end

TURNS = {"devices": "turns"}


class NotedTurns:
    """A guard's answers, and notes of what has the device."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.asked: dict[str, Any] = {}
        self.streams = 0

    def __call__(self, folder: Path, **asked: Any) -> Self:
        self.asked = asked
        return self

    async def run(self) -> None:
        self.streams += 1
        await asyncio.Event().wait()

    def lend(self, spell_s: float = 0.0) -> None:
        self.deeds.append("give back")

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.deeds.append("take")

    def engines(self) -> frozenset[str]:
        return frozenset()

    def engine_bytes(self) -> int:
        return 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedTurns:
    noted = NotedTurns()

    def note(name: str) -> None:
        deed = getattr(LocalLearning, name)

        def noting(self: LocalLearning, *args: Any, **fields: Any) -> Any:
            noted.deeds.append(name)
            return deed(self, *args, **fields)

        monkeypatch.setattr(LocalLearning, name, noting)

    for name in ("step", "restore_memory", "leave_device", "begin_checkpoint"):
        note(name)
    monkeypatch.setattr(training, "DeviceLoan", noted)
    return noted


@pytest.fixture
def sharing(tmp_path: Path) -> TrainerSettings:
    folders = {"warm_dir": str(tmp_path / "warm"), "cold_dir": str(tmp_path / "cold")}
    return replace(SETTINGS, turns=True, grant_dir=str(tmp_path / "grants"), **folders)


async def test_the_device_is_asked_for_before_each_step_and_given_back_with_the_state(
    noted: NotedTurns, sharing: TrainerSettings, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    given: dict[str, Any] = {"sharing": TURNS, "share": {"priority": 3}}
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 3}, **given), None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
    whole = ("take", "restore_memory", "step", "leave_device", "give back")
    kept = ("take", "restore_memory", "step", "begin_checkpoint", "leave_device", "give back")
    assert noted.deeds == ["take", "leave_device", "give back", *whole, *kept, *kept]
    assert noted.asked["priority"] == 3
    assert noted.asked["pids"]
    alone = make_cluster(make_spec(tiny_model, tmp_path / "alone", trainer={"steps": 3}), None)
    await train_to_end(alone, make_client(alone))
    assert apart(final_weights(cluster), final_weights(alone)) == 0.0


async def test_a_trainer_that_shares_its_device_takes_turns_for_a_run_that_does_not_ask_for_it(
    noted: NotedTurns, sharing: TrainerSettings, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    """A coordinator of the release before leaves the key out."""
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 1}), None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
    assert noted.deeds.count("take") == noted.deeds.count("leave_device") == noted.deeds.count("give back") == 2


async def test_a_run_that_streams_has_its_turn_once_all_groups_are_there(
    noted: NotedTurns, sharing: TrainerSettings, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    trainer = {"steps": 1, "streaming": True, "minibatches": 1}
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer=trainer, sharing=TURNS), None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
    assert noted.deeds.count("take") == 2
    assert torch.isfinite(torch.cat([one.flatten() for one in final_weights(cluster).values()])).all()


async def test_a_training_that_is_cancelled_in_its_turn_parks_its_state_and_gives_the_turn_back(
    noted: NotedTurns,
    sharing: TrainerSettings,
    tiny_model: Path,
    tmp_path: Path,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, stepping = make_cluster(make_spec(tiny_model, tmp_path, sharing=TURNS), None), asyncio.Event()
    loop = asyncio.get_running_loop()
    step = LocalLearning.step

    def told(self: LocalLearning, *args: Any, **fields: Any) -> Any:
        loop.call_soon_threadsafe(stepping.set)
        return step(self, *args, **fields)

    monkeypatch.setattr(LocalLearning, "step", told)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(feed(cluster))
        training_it = tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
        await stepping.wait()
        training_it.cancel()
        feeding.cancel()
    assert noted.deeds[-2:] == ["leave_device", "give back"]
    assert noted.deeds.count("take") == noted.deeds.count("give back")


async def test_a_training_states_no_wish_while_the_step_of_one_before_it_computes_in_its_process(
    noted: NotedTurns,
    sharing: TrainerSettings,
    tiny_model: Path,
    tmp_path: Path,
    make_cluster: Any,
    make_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guard would take it that the turn is given back."""
    cluster, stepping, ends = (
        make_cluster(make_spec(tiny_model, tmp_path, sharing=TURNS), None),
        asyncio.Event(),
        Event(),
    )
    loop = asyncio.get_running_loop()

    def stuck(self: LocalLearning, *args: Any, **fields: Any) -> Any:
        loop.call_soon_threadsafe(stepping.set)
        ends.wait(30)
        raise RunFailed("it was stuck")

    monkeypatch.setattr(LocalLearning, "step", stuck)
    monkeypatch.setattr(turn_loan, "_LEAVE_S", 0.05)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(feed(cluster))
        first = tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
        await stepping.wait()
        first.cancel()
        await asyncio.wait({first})
        second = tasks.create_task(train(make_client(cluster), lease_of(cluster), sharing))
        await asyncio.wait({second}, timeout=0.3)
        assert noted.streams == 1
        ends.set()
        await wait_until(lambda: noted.streams == 2, 20)
        second.cancel()
        feeding.cancel()


class WaitingDevice(OwnDevice):
    """Another trainer has its turn, for ever."""

    def __init__(self) -> None:
        self.lent_at: list[float] = []

    def lend(self, spell_s: float = 0.0) -> None:
        self.lent_at.append(time.monotonic())

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        await asyncio.Event().wait()


class NotedState:
    """What a `TurnLoan` moves."""

    def __init__(self) -> None:
        self.forgotten = False

    def forget_parked(self) -> None:
        self.forgotten = True


async def test_a_training_that_ends_while_it_waits_takes_its_wish_back_and_frees_what_it_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its turn may have begun unseen: a guard that is not told kills it."""
    monkeypatch.setattr(turn_loan, "_TOLD_S", 0.1)
    device, state = WaitingDevice(), NotedState()
    loan = TurnLoan(device, asyncio.to_thread)
    loan.learns(state)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loan.take(), 0.01)
    assert len(device.lent_at) == 1
    await loan.close()
    assert time.monotonic() - device.lent_at[0] >= 0.1
    assert state.forgotten


def test_a_run_that_takes_turns_is_refused_by_a_trainer_that_has_its_device_alone(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, tmp_path, sharing=TURNS)
    with pytest.raises(InvalidRequest, match=r"sharing.devices: .*start the trainer with turns"):
        check_trainable(spec, replace(SETTINGS, model_roots=("/",)))
    with pytest.raises(InvalidRequest, match=r"sharing.devices: only the built-in trainer"):
        check_spec(make_spec(tmp_path, tmp_path, sharing=TURNS, trainer={"name": "mine:train"}))


def test_a_trainer_that_shares_its_device_refuses_a_run_whose_trainer_would_not_ask(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, tmp_path, trainer={"name": "mine:train"})
    with pytest.raises(InvalidRequest, match=r"trainer.name: only the built-in trainer takes turns"):
        check_trainable(spec, replace(SETTINGS, turns=True, model_roots=("/",)))


def test_settings_that_cannot_take_turns_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="grant_dir: is needed to take turns"):
        TrainerSettings(turns=True).check_device()
    with pytest.raises(InvalidRequest, match="turns: a device that is lent"):
        TrainerSettings(turns=True, generate=True, grant_dir=str(tmp_path)).check_device()
    with pytest.raises(InvalidRequest, match="warm_mib: is for trainers that take turns"):
        TrainerSettings(warm_mib=5).check_device()
    folders = {name: str(tmp_path / name) for name in ("grant_dir", "warm_dir", "cold_dir")}
    TrainerSettings(turns=True, **folders).check_device()  # type: ignore[arg-type]
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in folders.values())
