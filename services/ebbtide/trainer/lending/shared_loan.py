"""Lends the devices of all ranks by one decision, and takes all of them back, through the guards of several hosts.

Ranks on one host share its guard. Each rank names to all others the folder that it was given, and the lowest rank of
each folder leads there. All ranks lend, or none: a step that waits for one rank's device waits for all.

Rank 0 states its wish to the guard of its own host, and leaves a note for the ranks that lead the others. Each
(`LoanFollower`) carries the wish on under the lease of rank 0's run, and answers twice: when no engine computes there,
and when all have given up memory. A step begins once every host has given both answers.

Trainers that take turns on the devices (`ebbtide.trainer.lending.turn_loan`) are granted one host after another, in one
order for all trainers, and give all of them back at once.

Partial failure ends in one of three ways. A host whose guard is away gives its device back as soon as its pages show
that no engine computes. A host that does not, because a stuck engine has nobody who stops it, or because another run
owns its device, ends the wait after a while: the trainer gives all devices up and takes its run up again, and the error
names the host. A rank that is gone, or frozen, ends all ranks, as in any step. Whoever ends gives its devices up, and
each guard lends its own.

Invariant: notes of wishes are numbered without gaps. Those that every host has followed are removed. The wish dies with
the process: followers then end their streams. Every stream to a guard carries the lease of rank 0's run, so a guard
that has met a newer lease refuses an older trainer's wish, whichever rank brings it. A follower keeps its stream only
while rank 0's store answers: a host whose rank 0 is gone, or frozen, lends its devices like that of a dead trainer.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, Unavailable
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.trainer.lending.device_loan import DeviceLoan, DeviceProgress
from ebbtide.trainer.ranks.rank_world import RankBoard
from ebbtide.types.grants import OwnerWish

#: Wishes are numbered from here on, over all runs of a process.
FIRST: Final = 1


class SharedWish(Struct, frozen=True, kw_only=True):
    """What rank 0 wants of the devices of all hosts."""

    wish: OwnerWish | None = None  # None: it owns them no longer
    ranks: tuple[int, ...] | None = None  # leaders that the wish is for, if others are to lend; None: for all


class LeaderAnswer(Struct, frozen=True, kw_only=True):
    """What became of a wish on one host. `owner` and `sequence` are those of the wish."""

    owner: str = ""
    sequence: int = -1
    progress: DeviceProgress = DeviceProgress()
    engines: tuple[str, ...] = ()  # the workers whose engines run on the host's devices
    superseded: str = ""  # why a guard refused this trainer for good


def wish_name(number: int) -> str:
    return f"ebbtide/loans/wish/{number}"


def answer_name(rank: int) -> str:
    return f"ebbtide/loans/answer/{rank}"


def encode(note: SharedWish | LeaderAnswer) -> bytes:
    data: bytes = msgspec.msgpack.encode(note)
    return data


def decode_wish(data: bytes, rank: int | None = None) -> OwnerWish | None:
    """The wish that a note has for the rank that leads a host."""
    found: SharedWish = msgspec.msgpack.decode(data, type=SharedWish)
    if found.wish is None or found.ranks is None or rank in found.ranks:
        return found.wish
    return replace(found.wish, lend=True)


def decode_answer(data: bytes) -> LeaderAnswer:
    found: LeaderAnswer = msgspec.msgpack.decode(data, type=LeaderAnswer)
    return found


#: All ranks have joined before: they tell their places within this time.
_PLACES_S: Final = 60.0
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class LendingPlace(Struct, frozen=True):
    """A rank's folder of grants."""

    host: str  # for people
    folder: str  # the same for ranks that share the folder, whatever each calls it; empty: this rank lends nothing
    pids: tuple[int, ...] = ()  # of the rank; of a leader, those of all ranks that share the folder


def own_place(folder: str) -> LendingPlace:
    """The place of a rank that was given the existing `folder`; empty: none."""
    if not folder:
        return LendingPlace(socket.gethostname(), "")
    state = Path(folder).stat()
    return LendingPlace(socket.gethostname(), f"{_BOOT.read_text().strip()}:{state.st_dev}:{state.st_ino}")


def leaders(places: Mapping[int, LendingPlace]) -> dict[int, LendingPlace]:
    """The ranks that speak for a guard, each with its place; empty if no rank lends. Raises `InvalidRequest` if only
    some do."""
    lending = {rank for rank, place in places.items() if place.folder}
    if not lending:
        return {}
    if apart := sorted(places.keys() - lending):
        text = (
            f"is set for rank {min(lending)}, but not for rank {apart[0]} on {places[apart[0]].host}; set generate and "
        )
        raise InvalidRequest(
            text + "grant_dir for the ranks of every host, and run a serving-guard on each", field="generate"
        )
    found: dict[str, int] = {}
    pids: dict[str, tuple[int, ...]] = {}
    for rank in sorted(places):
        place = places[rank]
        found.setdefault(place.folder, rank)
        pids[place.folder] = pids.get(place.folder, ()) + place.pids
    return {rank: replace(places[rank], pids=pids[folder]) for folder, rank in found.items()}


async def tell_places(board: RankBoard, rank: int, size: int, folder: str) -> dict[int, LendingPlace]:
    """Tells this rank's place and returns the `leaders` of all. All ranks call this. Raises `InvalidRequest` as
    `leaders` does, and `Unavailable` if a rank does not tell its place."""
    own = replace(own_place(folder), pids=(os.getpid(),))
    await board.put(_name(rank), msgspec.msgpack.encode(own))
    places: dict[int, LendingPlace] = {}
    for other in range(size):
        note = await board.await_one(_name(other), _PLACES_S)
        if note is None:
            raise InvalidRequest(
                f"rank {other} of {size} does not say what it lends; start all ranks anew", field="ranks"
            )
        places[other] = msgspec.msgpack.decode(note, type=LendingPlace)
    return leaders(places)


def _name(rank: int) -> str:
    return f"ebbtide/loans/place/{rank}"


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
    "trainer_hosts_compute_seconds", "with ranks on several hosts: a take-back until no engine computes on any"
)
_waits = telemetry.histogram(
    "trainer_hosts_take_back_seconds",
    "with ranks on several hosts: a wait of a step until all have given their devices back",
)


class LendingRanks:
    """What rank 0 knows of the ranks that lead other hosts, for as long as its process lives."""

    def __init__(self, board: RankBoard, leaders: Mapping[int, LendingPlace]) -> None:
        """`leaders`: of all hosts. Rank 0 leads its own."""
        self.board = board
        self.hosts = {rank: place.host for rank, place in leaders.items()}
        self.pids = leaders[0].pids  # of the ranks on this host
        self.others = sorted(rank for rank in leaders if rank)
        self.in_order = sorted(leaders, key=lambda rank: leaders[rank].folder)  # the same for all trainers
        self._number = FIRST
        self._removed = FIRST
        self._posting = asyncio.Lock()

    async def post(self, wish: OwnerWish | None, ranks: tuple[int, ...] | None = None) -> None:
        """Leaves the next note, for all leaders or some. Raises `Unavailable`: then all ranks end, as their store is
        gone."""
        async with self._posting:
            number, self._number = self._number, self._number + 1
            await self.board.put(wish_name(number), encode(SharedWish(wish=wish, ranks=ranks)))

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
        self,
        folder: Path,
        ranks: LendingRanks,
        *,
        run_id: str,
        lease: int,
        turns: bool = False,
        priority: int = 0,
        hopeless_s: float = _HOPELESS_S,
    ) -> None:
        """`folder`: of rank 0's host. `lease`: number of the run's trainer lease. `turns`: the trainer takes turns with
        others on the devices, with this `priority`."""
        pids = ranks.pids if turns else ()
        self._own = DeviceLoan(folder, run_id=run_id, lease=lease, pids=pids, priority=priority)
        self._ranks, self._turns, self._hopeless_s = ranks, turns, hopeless_s
        self._wishes: asyncio.Queue[tuple[OwnerWish, tuple[int, ...] | None]] = asyncio.Queue()
        self._answers: dict[int, LeaderAnswer] = {}
        self._heard = asyncio.Event()
        self._asked = asyncio.Event()  # set when answers are to be read at once
        self._waiting = False

    def lend(self, spell_s: float = 0.0) -> None:
        self._want(lend=True, spell_s=spell_s)

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        """As `TrainingDevice`. Raises `Unavailable` naming a host that does not give its device back."""
        self._waiting = True
        try:
            for ranks in self._stages():
                self._want(lend=False, spell_s=spell_s, hand_over=hand_over, ranks=ranks)
                self._asked.set()
                await self._all_back(ranks)
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

    def _stages(self) -> list[tuple[int, ...] | None]:
        """The leaders that have the devices in the end, and those that have theirs before. Trainers that take turns
        ask host after host, all in one order: so the first host's turn decides, and no two trainers wait for one
        another with a host each."""
        if not self._turns:
            return [None]
        order = self._ranks.in_order
        return [tuple(order[: count + 1]) for count in range(len(order))]

    def _want(
        self, *, lend: bool, spell_s: float, hand_over: bool = False, ranks: tuple[int, ...] | None = None
    ) -> None:
        wish = self._own.next_wish(lend=lend, spell_s=spell_s, hand_over=hand_over)
        self._own.want(wish if ranks is None or 0 in ranks else replace(wish, lend=True))
        self._wishes.put_nowait((wish, ranks))

    async def _post(self) -> None:
        while True:
            await self._ranks.post(*await self._wishes.get())

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

    async def _all_back(self, ranks: tuple[int, ...] | None) -> None:
        began = time.monotonic()
        await self._until(began, lambda one: one.compute_back, ranks)
        _compute.observe(time.monotonic() - began)
        await self._until(began, lambda one: one.back, ranks)
        _waits.observe(time.monotonic() - began)

    async def _until(
        self, began: float, given: Callable[[DeviceProgress], bool], ranks: tuple[int, ...] | None
    ) -> None:
        """Returns once all hosts have `given` back, or those of `ranks`. Raises `Unavailable`."""
        told = time.monotonic()
        while True:
            found = {rank: one for rank, one in self._progress().items() if ranks is None or rank in ranks}
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


#: A wait for the next wish ends after this time, and begins again: an answer of the store is rank 0's sign of life.
_WAIT_S: Final = 1.0
#: Without one for so long, rank 0 counts as gone. A guard's patience with a silent owner is about the same.
_SILENT_S: Final = 10.0
#: How often the answer is renewed: while rank 0 waits for it, and otherwise.

_FOLLOW_LOOK_S: Final = 0.2


class LoanFollower:
    """One of several hosts of a trainer. Its rank, which is not 0, leads there."""

    def __init__(
        self, folder: Path, board: RankBoard, rank: int, *, pids: Sequence[int] = (), silent_s: float = _SILENT_S
    ) -> None:
        """`folder`: of the guard's socket and the engines' pages. `pids`: the ranks' processes on this host."""
        self._folder, self._board, self._rank, self._silent_s = folder, board, rank, silent_s
        self._pids = tuple(pids)
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
                await asyncio.sleep(_FOLLOW_LOOK_S)
                continue
            if note is not None:
                number, newest = number + 1, decode_wish(note, self._rank)
            if note is not None or self._loan is None:  # rank 0 may have been frozen: its wish still stands
                await self._take(newest)

    async def _take(self, wish: OwnerWish | None) -> None:
        if wish is not None and wish.pids:  # rank 0's are those of its own host
            wish = replace(wish, pids=self._pids)
        old = self._loan.wish if self._loan else None
        if wish is None or old is None or (old.run_id, old.lease, old.owner) != (wish.run_id, wish.lease, wish.owner):
            await self._leave()
        if wish is None:
            return
        if self._loan is None:
            self._superseded = ""
            self._loan = DeviceLoan(
                self._folder,
                run_id=wish.run_id,
                lease=wish.lease,
                owner=wish.owner,
                pids=wish.pids,
                priority=wish.priority,
            )
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
                async with asyncio.timeout(_AWAITED_S if awaited else _FOLLOW_LOOK_S):
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
