"""Lends the devices of all ranks by one decision, and takes all of them back, through the guards of several hosts.

Rank 0 states its wish to the guard of its own host, and leaves a note for the ranks that lead the others. Each
carries the wish on under the lease of rank 0's run, and answers twice: when no engine computes there, and when all have
given up memory. A step begins once every host has given both answers.

Partial failure ends in one of three ways. A host whose guard is away gives its device back as soon as its pages show
that no engine computes. A host that does not, because a stuck engine has nobody who stops it, or because another run
owns its device, ends the wait after a while: the trainer gives all devices up and takes its run up again, and the error
names the host. A rank that is gone, or frozen, ends all ranks, as in any step. Whoever ends gives its devices up, and
each guard lends its own.

Invariant: notes of wishes are numbered without gaps. Those that every host has followed are removed. The wish dies with
the process: followers then end their streams.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, LeaseSuperseded, Unavailable
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.trainer.device_loan import DeviceLoan, DeviceProgress
from ebbtide.trainer.lending.lending_places import LendingPlace
from ebbtide.trainer.lending.loan_notes import (
    FIRST,
    LeaderAnswer,
    SharedWish,
    answer_name,
    decode_answer,
    encode,
    wish_name,
)
from ebbtide.trainer.ranks.rank_board import RankBoard
from ebbtide.types.loans import OwnerWish

log = get_logger(__name__)

#: How often answers are read: while a step waits for them, and otherwise.
_AWAITED_S: Final = 0.005
_LOOK_S: Final = 0.5
#: A host that gave nothing back for so long, without a guard that works on it, ends the wait. A guard that works
#: kills engines that keep its device (`memory_s`), and a supervised one is back long before.
_HOPELESS_S: Final = 90.0
#: While a step waits, the reason is logged so often.
_TELL_S: Final = 20.0
#: Time to tell the other hosts of the end.
_OVER_S: Final = 2.0

_compute = telemetry.histogram(
    "trainer_hosts_compute_seconds", "A take-back of several hosts' devices, until no engine computes on any"
)
_waits = telemetry.histogram("trainer_hosts_take_back_seconds", "A step's wait for the devices of several hosts")


class LendingRanks:
    """What rank 0 knows of the ranks that lead other hosts, for as long as its process lives."""

    def __init__(self, board: RankBoard, leaders: Mapping[int, LendingPlace]) -> None:
        """`leaders`: of all hosts. Rank 0 leads its own."""
        self.board = board
        self.hosts = {rank: place.host for rank, place in leaders.items()}
        self.others = sorted(rank for rank in leaders if rank)
        self._number = FIRST
        self._removed = FIRST
        self._posting = asyncio.Lock()

    async def post(self, wish: OwnerWish | None) -> None:
        """Leaves the next note. Raises `Unavailable`: then all ranks end, as their store is gone."""
        async with self._posting:
            number, self._number = self._number, self._number + 1
            await self.board.put(wish_name(number), encode(SharedWish(wish=wish)))

    async def forget(self) -> None:
        """Removes the notes that every host has followed: all but the newest."""
        while self._removed < self._number - 1:
            await self.board.remove(wish_name(self._removed))
            self._removed += 1

    async def answers(self) -> dict[int, LeaderAnswer]:
        """The newest answer of each other host that has given one."""
        names = {answer_name(rank): rank for rank in self.others}
        found = await self.board.find(list(names))
        return {names[name]: decode_answer(note) for name, note in found.items()}


class SharedLoan:
    """A `TrainingDevice`: those of all ranks, on several hosts. `run` has to run meanwhile."""

    def __init__(
        self, folder: Path, ranks: LendingRanks, *, run_id: str, lease: int, hopeless_s: float = _HOPELESS_S
    ) -> None:
        """`folder`: of rank 0's host. `lease`: number of the run's trainer lease."""
        self._own = DeviceLoan(folder, run_id=run_id, lease=lease)
        self._ranks, self._hopeless_s = ranks, hopeless_s
        self._wishes: asyncio.Queue[OwnerWish] = asyncio.Queue()
        self._answers: dict[int, LeaderAnswer] = {}
        self._heard = asyncio.Event()
        self._asked = asyncio.Event()  # set when answers are to be read at once
        self._waiting = False

    def lend(self, spell_s: float = 0.0) -> None:
        self._want(lend=True, spell_s=spell_s)

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        """As `TrainingDevice`. Raises `Unavailable` naming a host that does not give its device back."""
        self._want(lend=False, spell_s=spell_s, hand_over=hand_over)
        self._waiting = True
        self._asked.set()
        try:
            await self._all_back()
        finally:
            self._waiting = False
        with suppress(Unavailable):
            await self._ranks.forget()

    def engines(self) -> frozenset[str]:
        return self._own.engines().union(*(answer.engines for answer in self._answers.values()))

    def engine_bytes(self) -> int:
        return max(progress.engine_bytes for progress in self._progress().values())

    async def run(self) -> None:
        """Carry wishes to all hosts, forever. Raises `LeaseSuperseded` if any of them has a newer owner."""
        try:
            await race(self._own.run(), self._post(), self._watch())
        finally:
            with suppress(EbbtideError, TimeoutError):
                async with asyncio.timeout(_OVER_S):
                    await self._ranks.post(None)

    def _want(self, *, lend: bool, spell_s: float, hand_over: bool = False) -> None:
        self._own.want(self._own.next_wish(lend=lend, spell_s=spell_s, hand_over=hand_over))
        self._wishes.put_nowait(self._own.wish)

    async def _post(self) -> None:
        while True:
            await self._ranks.post(await self._wishes.get())

    async def _watch(self) -> None:
        while True:
            self._answers = await self._ranks.answers()
            self._heard.set()
            for answer in self._answers.values():
                if answer.superseded and answer.owner == self._own.wish.owner:
                    raise LeaseSuperseded(answer.superseded)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AWAITED_S if self._waiting else _LOOK_S):
                    await self._asked.wait()
            self._asked.clear()

    async def _all_back(self) -> None:
        began = time.monotonic()
        await self._until(began, lambda one: one.compute_back)
        _compute.observe(time.monotonic() - began)
        await self._until(began, lambda one: one.back)
        _waits.observe(time.monotonic() - began)

    async def _until(self, began: float, given: Callable[[DeviceProgress], bool]) -> None:
        """Returns once all hosts have `given` back. Raises `Unavailable`."""
        told = time.monotonic()
        while True:
            found = self._progress()
            if all(map(given, found.values())):
                return
            self._check_hope(found, time.monotonic() - began)
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                log.warning("waiting for devices", reasons=self._reasons(found))
            self._heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_AWAITED_S):
                    await self._heard.wait()

    def _progress(self) -> dict[int, DeviceProgress]:
        """What became of the newest wish on each host, by its leading rank."""
        wish, found = self._own.wish, {0: self._own.progress()}
        for rank in self._ranks.others:
            answer = self._answers.get(rank, LeaderAnswer())
            current = (answer.owner, answer.sequence) == (wish.owner, wish.sequence)
            late = DeviceProgress(waits_for="an answer of the rank", engine_bytes=answer.progress.engine_bytes)
            found[rank] = answer.progress if current else late
        return found

    def _check_hope(self, found: Mapping[int, DeviceProgress], waited_s: float) -> None:
        """Raises `Unavailable` for a host that nothing can be expected of."""
        if waited_s < self._hopeless_s:
            return
        for rank, one in found.items():
            silent = rank and self._answers.get(rank, LeaderAnswer()).sequence != self._own.wish.sequence
            if not one.back and (silent or one.apart_s >= self._hopeless_s):
                raise Unavailable(
                    f"host {self._ranks.hosts[rank]} (rank {rank}) does not give its device back: it waits for "
                    f"{one.waits_for}; see that its serving-guard runs, and that no other run trains on that host"
                )

    def _reasons(self, found: Mapping[int, DeviceProgress]) -> dict[str, str]:
        return {self._ranks.hosts[rank]: one.waits_for for rank, one in found.items() if not one.back}
