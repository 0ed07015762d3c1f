"""Engines get a device once the trainer's memory has left it, and a step begins once that is back."""

import asyncio
import threading

from ebbtide.testing import wait_until
from ebbtide.trainer.lending.memory_loan import MemoryLoan


class Noted:
    """A device, and what trains on it: what was asked of both, in order."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.moving = threading.Event()
        self.moving.set()

    def lend(self, spell_s: float = 0.0) -> None:
        self.deeds.append(f"lend {spell_s:g}")

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.deeds.append(f"take back {spell_s:g}")

    def engines(self) -> frozenset[str]:
        return frozenset({"mine"})

    def engine_bytes(self) -> int:
        return 7

    def give_up_memory(self, needed: int) -> None:
        self.deeds.append(f"give up for {needed}")
        self.moving.wait(10)
        self.deeds.append("given up")

    def restore_memory(self) -> None:
        self.deeds.append("restore")


async def test_memory_leaves_before_the_loan_and_comes_back_after_it() -> None:
    noted = Noted()
    loan = MemoryLoan(noted, noted)
    loan.lend(3.0)
    await wait_until(lambda: "lend 3" in noted.deeds)
    await loan.take_back(2.0)
    assert noted.deeds == ["give up for 7", "given up", "lend 3", "take back 2", "restore"]


async def test_a_device_that_is_taken_back_while_its_memory_moves_is_not_lent() -> None:
    noted = Noted()
    noted.moving.clear()
    loan = MemoryLoan(noted, noted)
    loan.lend()
    await wait_until(lambda: noted.deeds == ["give up for 7"])
    taking = asyncio.create_task(loan.take_back())
    for _ in range(20):
        await asyncio.sleep(0)
    assert noted.deeds == ["give up for 7"]
    noted.moving.set()
    await taking
    assert noted.deeds == ["give up for 7", "given up", "take back 0", "restore"]


async def test_a_device_that_was_never_lent_is_taken_back_at_once() -> None:
    noted = Noted()
    await MemoryLoan(noted, noted).take_back()
    assert noted.deeds == ["take back 0", "restore"]
