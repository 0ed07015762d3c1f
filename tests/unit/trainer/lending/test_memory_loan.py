"""Engines get a device once the trainer's memory has left it, and a step begins once that is back."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from ebbtide.run_client import RunFailed
from ebbtide.runtime import race
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.lending.device_loan import MemoryLoan
from ebbtide.trainer.ranks.rank_launcher import RankLost
from ebbtide.types.remaining_work import OpenGroup, RemainingWork
from tests.support.waiting import wait_until


class Noted:
    """A device, and what trains on it: what was asked of both, in order."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.moving = threading.Event()
        self.moving.set()
        self.needed = 7
        self.failure: Exception | None = None
        self.lacks = 0
        self.left = RemainingWork(open=1, groups=(OpenGroup(prompt=5, running=(3,)),))

    def lend(self, spell_s: float = 0.0) -> None:
        self.deeds.append(f"lend {spell_s:g}")

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.deeds.append(f"take back {spell_s:g}")

    def engines(self) -> frozenset[str]:
        return frozenset({"mine"})

    def engine_bytes(self) -> int:
        return self.needed

    async def remaining_work(self) -> RemainingWork:
        return self.left

    def give_up_memory(self, needed: int) -> int:
        self.deeds.append(f"give up for {needed}")
        self.moving.wait(10)
        if self.failure is not None:
            raise self.failure
        self.deeds.append("given up")
        return self.lacks

    def restore_memory(self) -> None:
        self.deeds.append("restore")


@asynccontextmanager
async def loan_of(noted: Noted) -> AsyncIterator[MemoryLoan]:
    loan = MemoryLoan(noted, cast("LocalLearning", noted), noted.remaining_work, look_s=0.01)
    running = asyncio.create_task(loan.run())
    try:
        yield loan
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_memory_leaves_before_the_loan_and_comes_back_after_it() -> None:
    noted = Noted()
    async with loan_of(noted) as loan:
        loan.lend(3.0)
        await wait_until(lambda: "lend 3" in noted.deeds)
        await loan.take_back(2.0)
    assert noted.deeds == ["give up for 7", "given up", "lend 3", "take back 2", "restore"]


async def test_a_device_that_is_taken_back_while_its_memory_moves_is_not_lent() -> None:
    noted = Noted()
    noted.moving.clear()
    async with loan_of(noted) as loan:
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
    async with loan_of(noted) as loan:
        await loan.take_back()
    assert noted.deeds == ["take back 0", "restore"]


async def test_a_loan_whose_forecast_changes_is_told_without_another_move() -> None:
    noted = Noted()
    async with loan_of(noted) as loan:
        loan.lend(3.0)
        await wait_until(lambda: "lend 3" in noted.deeds)
        loan.lend(9.0)
        assert noted.deeds == ["give up for 7", "given up", "lend 3", "lend 9"]


async def test_a_forecast_that_changes_while_memory_moves_is_the_one_that_is_told() -> None:
    noted = Noted()
    noted.moving.clear()
    async with loan_of(noted) as loan:
        loan.lend(3.0)
        await wait_until(lambda: noted.deeds == ["give up for 7"])
        loan.lend(9.0)
        noted.moving.set()
        await wait_until(lambda: "lend 9" in noted.deeds)
    assert noted.deeds == ["give up for 7", "given up", "lend 9"]


async def test_an_engine_that_comes_during_the_loan_gets_room() -> None:
    noted = Noted()
    noted.needed = 0
    async with loan_of(noted) as loan:
        loan.lend(3.0)
        await wait_until(lambda: "lend 3" in noted.deeds)
        noted.needed = 8
        await wait_until(lambda: "give up for 8" in noted.deeds)
        await loan.take_back()
    assert noted.deeds.count("give up for 8") == 1
    assert noted.deeds[-1] == "restore"


async def test_a_move_that_fails_ends_the_training_at_once() -> None:
    noted = Noted()
    noted.failure = RankLost("rank 1 is gone")
    loan = MemoryLoan(noted, cast("LocalLearning", noted), noted.remaining_work)
    loan.lend()
    with pytest.raises(RankLost, match="rank 1 is gone"):
        await asyncio.wait_for(race(loan.run(), asyncio.Event().wait()), 10)
    assert not any(deed.startswith("lend") for deed in noted.deeds)


def quick_loan(noted: Noted) -> MemoryLoan:
    noted.lacks = 3
    return MemoryLoan(
        noted, cast("LocalLearning", noted), noted.remaining_work, look_s=0.01, work_look_s=0.01, patience_s=0.3
    )


async def test_a_run_whose_only_engine_lacks_memory_ends_and_says_how_much() -> None:
    loan = quick_loan(Noted())
    loan.lend()
    with pytest.raises(RunFailed, match="needs 7 bytes of it and lacks 3"):
        await asyncio.wait_for(loan.run(), 10)


async def test_a_run_that_others_generate_for_goes_on_without_the_engine() -> None:
    noted = Noted()
    loan = quick_loan(noted)
    running, looks = asyncio.create_task(loan.run()), 0

    async def made() -> RemainingWork:
        nonlocal looks
        looks += 1
        return RemainingWork(open=1, groups=(OpenGroup(prompt=5, running=(looks,)),))

    loan._remaining_work = made
    loan.lend()
    await wait_until(lambda: looks > 60)  # twice its patience
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
