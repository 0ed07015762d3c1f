"""What rank 0 wants of its device it wants of those on other hosts, and what these tell counts as what its own does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.errors import EbbtideError
from ebbtide.trainer.lending.device_loan import DeviceProgress
from ebbtide.trainer.lending.shared_loan import (
    FIRST,
    LeaderAnswer,
    LendingPlace,
    LendingRanks,
    SharedLoan,
    answer_name,
    decode_wish,
    encode,
    wish_name,
)
from ebbtide.types.grants import OwnerWish
from tests.fakes.rank_notes import SharedNotes
from tests.support.waiting import wait_until

OTHER = 2


@pytest.fixture
def board() -> SharedNotes:
    return SharedNotes()


@pytest.fixture
async def loan(tmp_path: Path, board: SharedNotes) -> AsyncIterator[SharedLoan]:
    ranks = LendingRanks(board, {0: LendingPlace("a", "1"), OTHER: LendingPlace("b", "2")})
    loan = SharedLoan(tmp_path, ranks, run_id="r", lease=3)
    running = asyncio.create_task(loan.run())
    yield loan
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def told(board: SharedNotes, number: int) -> OwnerWish:
    note = await board.await_one(wish_name(number), 10)
    assert note is not None
    wish = decode_wish(note)
    assert wish is not None
    return wish


async def test_other_hosts_learn_for_how_long_and_that_their_rollouts_are_to_go_on_elsewhere(
    loan: SharedLoan, board: SharedNotes
) -> None:
    loan.lend(7.0)
    loan.lend(9.0)
    taking = asyncio.create_task(loan.take_back(4.0, hand_over=True))
    wishes = [await told(board, FIRST + at) for at in range(3)]
    assert [(one.lend, one.spell_s, one.hand_over) for one in wishes] == [
        (True, 7.0, False),
        (True, 9.0, False),
        (False, 4.0, True),
    ]
    assert len({(one.run_id, one.lease, one.owner) for one in wishes}) == 1
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_engines_of_all_hosts_are_the_trainers_and_the_largest_one_counts(
    loan: SharedLoan, board: SharedNotes
) -> None:
    assert (loan.engines(), loan.engine_bytes()) == (frozenset(), 0)
    answer = LeaderAnswer(progress=DeviceProgress(engine_bytes=5), engines=("w",))
    await board.put(answer_name(OTHER), encode(answer))
    loan.lend()
    await wait_until(lambda: loan.engines() == {"w"})
    assert loan.engine_bytes() == 5


async def test_other_hosts_lend_once_the_run_is_over(tmp_path: Path, board: SharedNotes) -> None:
    ranks = LendingRanks(board, {0: LendingPlace("a", "1"), OTHER: LendingPlace("b", "2")})
    for lease in (1, 2):
        running = asyncio.create_task(SharedLoan(tmp_path, ranks, run_id="r", lease=lease).run())
        for _ in range(5):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises((asyncio.CancelledError, EbbtideError)):
            await running
    assert [decode_wish(board.notes[wish_name(FIRST + at)]) for at in range(2)] == [None, None]
