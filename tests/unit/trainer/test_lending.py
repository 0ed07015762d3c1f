"""A trainer that generates has its device for itself while it trains, and lends it while it waits."""

import asyncio
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest, LeaseSuperseded
from ebbtide.rpc.backoff import pauses
from ebbtide.serving_guard.trainer_lender import REJOIN_S
from ebbtide.trainer import training
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.lending import device_loan
from ebbtide.trainer.service import train
from ebbtide.trainer.settings import TrainerSettings
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import SETTINGS, feed, make_spec

LENDING = replace(SETTINGS, generate=True, grant_dir="unused")


class NotedLoan:
    """Takes note of what is asked of a device."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.taken = asyncio.Event()
        self.taken.set()
        self.superseded = asyncio.Event()

    def __call__(self, folder: Path, *, run_id: str, lease: int) -> Self:
        self.deeds.append(f"{folder} {run_id} {lease}")
        return self

    async def run(self) -> None:
        await self.superseded.wait()
        raise LeaseSuperseded("a newer lease owns the device")

    def lend(self, spell_s: float = 0.0) -> None:
        if self.deeds[-1] != "lend":  # only the forecast is another
            self.deeds.append("lend")

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.deeds.append("take back")
        await self.taken.wait()

    def engines(self) -> frozenset[str]:
        return frozenset({"mine"})

    def engine_bytes(self) -> int:
        return 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedLoan:
    noted, step = NotedLoan(), LocalLearning.step

    def noting(self: LocalLearning, *args: Any, **fields: Any) -> Any:
        noted.deeds.append("train")
        return step(self, *args, **fields)

    monkeypatch.setattr(training, "DeviceLoan", noted)
    monkeypatch.setattr(LocalLearning, "step", noting)
    return noted


def lease_of(cluster: Any) -> Any:
    lease = cluster.lease("trainer")
    lease.number = 3
    return lease


async def test_the_device_is_lent_from_each_version_until_its_step_is_there(
    noted: NotedLoan, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 3}), None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        tasks.create_task(train(make_client(cluster), lease_of(cluster), LENDING))
    assert noted.deeds == [
        f"unused {cluster.run.run_id} 3",
        *("take back", "lend"),  # to load the model, until its version is announced
        *3 * ("take back", "train", "lend"),
    ]


async def test_no_step_begins_before_the_device_is_back(
    noted: NotedLoan, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path, trainer={"steps": 1}), None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(train(make_client(cluster), lease_of(cluster), LENDING))
        await wait_until(lambda: noted.deeds[-1:] == ["lend"], 30)
        noted.taken.clear()
        tasks.create_task(feed(cluster))
        await wait_until(lambda: noted.deeds[-1] == "take back", 30)
        for _ in range(100):
            await asyncio.sleep(0)
        assert "train" not in noted.deeds
        noted.taken.set()
    assert noted.deeds[-2:] == ["train", "lend"]


async def test_a_trainer_whose_device_has_a_newer_owner_steps_down(
    noted: NotedLoan, tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), None)
    noted.superseded.set()
    with pytest.raises(LeaseSuperseded):
        async with asyncio.timeout(60):
            await train(make_client(cluster), lease_of(cluster), LENDING)


def test_settings_that_cannot_lend_name_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "grants"
    with pytest.raises(InvalidRequest, match="grant_dir: is needed to generate"):
        TrainerSettings(generate=True).check_device()
    with pytest.raises(InvalidRequest, match="grant_dir: is for trainers that generate"):
        TrainerSettings(grant_dir=str(folder)).check_device()
    with pytest.raises(InvalidRequest, match="window_s: is for trainers that generate"):
        TrainerSettings(window_s=3.0).check_device()
    TrainerSettings(generate=True, grant_dir=str(folder)).check_device()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_owner_whose_stream_broke_is_back_before_its_device_counts_as_free() -> None:
    """However often it broke lately: the guard would lend the device in the middle of a step."""
    waits = pauses(0.05, device_loan._LONGEST_PAUSE_S)
    assert max(next(waits) for _ in range(100)) < REJOIN_S / 2
