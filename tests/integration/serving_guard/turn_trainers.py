"""Trainers of a tiny model that take turns on a device, each in its own process, and the ledger of their turns."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from ebbtide.serving_guard.turns_lender import TurnRecord, read_turns

ROOT = Path(__file__).parents[3]


class TurnTrainerProcess:
    """Tells each turn's number on a line when its step begins, and again with "done" when it has given the turn back.
    `model`: it trains a tiny network, whose state leaves between turns."""

    def __init__(self, folder: Path, run_id: str, *, lease: int = 1, stays_s: float = 0.0, model: bool = False) -> None:
        arguments = [str(folder), run_id, str(lease), str(stays_s), "model" if model else ""]
        command = [sys.executable, "-m", "tests.integration.serving_guard.turn_trainers", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def tell(self) -> dict[str, float]:
        """The next line."""
        assert self.process.stdout is not None
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    async def turn(self) -> dict[str, float]:
        """The beginning of the next step."""
        while "done" in (found := await asyncio.to_thread(self.tell)):
            pass
        return found


@contextlib.contextmanager
def turn_trainer(folder: Path, run_id: str, **given: Any) -> Iterator[TurnTrainerProcess]:
    trainer = TurnTrainerProcess(folder, run_id, **given)
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.communicate()


def check_turns(folder: Path) -> list[TurnRecord]:
    """By the ledger no turn began before the one before it had ended, and numbers rise."""
    records = read_turns(folder)
    open_turn, newest = 0, 0
    for record in records:
        if record.began:
            assert not open_turn, f"turn {record.turn} began within turn {open_turn}"
            assert record.turn > newest
            open_turn = newest = record.turn
        else:
            assert record.turn == open_turn
            open_turn = 0
    return records


class _Learning:
    """What a `TurnLoan` moves, with a step of a tiny network."""

    def __init__(self, folder: Path) -> None:
        from ebbtide.trainer.learning.learner import Learner, LearnerSettings
        from ebbtide.trainer.learning.parked_state import StatePark
        from ebbtide.trainer.learning.trainer_memory import CpuRoom, TrainerMemory
        from tests.unit.trainer.learning.tiny_networks import make_network, make_sample

        self._learner = Learner(make_network("qwen3"), LearnerSettings(), version=3)
        park = StatePark(folder / "warm", folder / "cold", warm_bytes=1 << 30)
        self._memory = TrainerMemory(self._learner.movable, CpuRoom(), whole=self._learner.everything, park=park)
        self._samples = [make_sample(12, 6)]
        self.leave_device, self.restore_memory = self._memory.leave, self._memory.restore

    def step(self) -> None:
        self._learner.step(self._samples, Random(0))


async def train(folder: Path, run_id: str, lease: int, stays_s: float, *, model: bool) -> None:
    """Train until killed. `stays_s`: how long a step takes at least."""
    from ebbtide.runtime import Aside
    from ebbtide.trainer.lending.device_loan import DeviceLoan
    from ebbtide.trainer.lending.turn_loan import DeviceSeat, TurnLoan

    seat = DeviceSeat(folder)
    device = DeviceLoan(folder, run_id=run_id, lease=lease, pids=[os.getpid()])
    running = asyncio.create_task(device.run())
    loan = TurnLoan(device, Aside("learning").do)
    await loan.take()
    learning = await asyncio.to_thread(_Learning, folder) if model else None
    if learning is not None:
        loan.learns(learning)  # type: ignore[arg-type]
    while not running.done():
        await loan.take()
        told = {"turn": device.turn, "at_s": time.monotonic(), "restored_s": loan.restored_s}
        print(json.dumps(told), flush=True)  # noqa: T201 - read by the test
        if learning is not None:
            await asyncio.to_thread(learning.step)
        await asyncio.sleep(stays_s)
        await loan.give_back()
        print(json.dumps({"done": told["turn"]}), flush=True)  # noqa: T201
    seat.leave()
    await running


if __name__ == "__main__":
    from ebbtide import telemetry

    telemetry.configure("turn-trainer")
    own_folder, own_run, own_lease, own_stay, own_model = sys.argv[1:]
    asyncio.run(train(Path(own_folder), own_run, int(own_lease), float(own_stay), model=bool(own_model)))
