"""Lends and takes back the devices of one host as rank 0 wishes, through that host's guard.

Invariant: every stream to the guard carries the lease of rank 0's run, so a guard that has met a newer lease
refuses an older trainer's wish, whichever rank brings it. The stream is kept only while rank 0's store answers: a host
whose rank 0 is gone, or frozen, lends its devices like that of a dead trainer. Nothing outlives the process.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final

from ebbtide.errors import EbbtideError, LeaseSuperseded, Unavailable
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.trainer.device_loan import DeviceLoan, DeviceProgress
from ebbtide.trainer.lending.loan_notes import (
    FIRST,
    LeaderAnswer,
    answer_name,
    decode_wish,
    encode,
    wish_name,
)
from ebbtide.trainer.ranks.rank_board import RankBoard
from ebbtide.types.loans import OwnerWish

log = get_logger(__name__)

#: A wait for the next wish ends after this time, and begins again: an answer of the store is rank 0's sign of life.
_WAIT_S: Final = 1.0
#: Without one for so long, rank 0 counts as gone. A guard's patience with a silent owner is about the same.
_SILENT_S: Final = 10.0
#: How often the answer is renewed: while rank 0 waits for it, and otherwise.
_AWAITED_S: Final = 0.005
_LOOK_S: Final = 0.2


class LoanFollower:
    """One of several hosts of a trainer. Its rank, which is not 0, leads there."""

    def __init__(self, folder: Path, board: RankBoard, rank: int, *, silent_s: float = _SILENT_S) -> None:
        """`folder`: of the guard's socket and the engines' pages."""
        self._folder, self._board, self._rank, self._silent_s = folder, board, rank, silent_s
        self._loan: DeviceLoan | None = None
        self._owning: asyncio.Task[None] | None = None
        self._superseded = ""
        self._wished = asyncio.Event()  # set when an answer is due at once

    async def run(self) -> None:
        """Follow rank 0's wishes, until cancelled."""
        try:
            await race(self._follow(), self._answer())
        finally:
            await self._leave()

    async def _follow(self) -> None:
        number = FIRST
        newest: OwnerWish | None = None
        while True:
            try:
                async with asyncio.timeout(self._silent_s):
                    note = await self._board.await_one(wish_name(number), min(_WAIT_S, self._silent_s / 2))
            except (TimeoutError, Unavailable) as error:
                if self._loan is not None:
                    log.warning("rank 0 is silent: its devices are given up here", reason=str(error))
                await self._leave()
                await asyncio.sleep(_LOOK_S)
                continue
            if note is not None:
                number, newest = number + 1, decode_wish(note)
            if note is not None or self._loan is None:  # rank 0 may have been frozen: its wish still stands
                await self._take(newest)

    async def _take(self, wish: OwnerWish | None) -> None:
        old = self._loan.wish if self._loan else None
        if wish is None or old is None or (old.run_id, old.lease, old.owner) != (wish.run_id, wish.lease, wish.owner):
            await self._leave()
        if wish is None:
            return
        if self._loan is None:
            self._superseded = ""
            self._loan = DeviceLoan(self._folder, run_id=wish.run_id, lease=wish.lease, owner=wish.owner)
            self._loan.want(wish)
            self._owning = asyncio.create_task(self._own(self._loan))
        else:
            self._loan.want(wish)
        self._wished.set()

    async def _own(self, loan: DeviceLoan) -> None:
        try:
            await loan.run()
        except LeaseSuperseded as error:
            log.warning("this trainer's wish is refused", reason=str(error))
            self._superseded = str(error)

    async def _leave(self) -> None:
        """End the stream to the guard, which then lends the devices."""
        owning, self._loan, self._owning = self._owning, None, None
        if owning is not None:
            owning.cancel()
            await asyncio.gather(owning, return_exceptions=True)

    async def _answer(self) -> None:
        told: LeaderAnswer | None = None
        while True:
            answer = self._answer_now()
            if answer != told:
                with suppress(EbbtideError):
                    await self._board.put(answer_name(self._rank), encode(answer))
                    told = answer
            awaited = self._loan is not None and not self._loan.wish.lend and not answer.progress.back
            with suppress(TimeoutError):
                async with asyncio.timeout(_AWAITED_S if awaited else _LOOK_S):
                    await self._wished.wait()
            self._wished.clear()

    def _answer_now(self) -> LeaderAnswer:
        loan = self._loan
        if loan is None:
            return LeaderAnswer()
        wish = loan.wish
        found = loan.progress()
        progress = DeviceProgress(engine_bytes=found.engine_bytes) if wish.lend else found
        return LeaderAnswer(
            owner=wish.owner,
            sequence=wish.sequence,
            progress=progress,
            engines=tuple(sorted(loan.engines())),
            superseded=self._superseded,
        )
