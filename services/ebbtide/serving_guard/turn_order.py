"""Decides whose turn it is on a device that the trainers of several runs share.

The device goes to the next one that waits as soon as it is free. Of those that wait, higher priority goes first; with
the same priority, the run whose last turn is longest ago, so that runs go round. One that was passed over `PASSES`
times goes before all others. A trainer keeps its turn until it gives it back. It loses the turn when it is silent, when
its stream stays broken, when it keeps the turn for longer than `turn_s`, or when a newer trainer of its run comes: its
processes are to be killed then, and the next turn begins once they are gone. One that died loses it at once.

Invariant: at most one turn, which ends before the next one begins; numbers of turns rise. Of each run one connection
counts, that of the newest lease. Lost with the process: who waits, which trainers state again, and who was served when.
The turn itself is handed to the next life, which waits for its trainer as for one whose stream broke.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import Superseded
from ebbtide.serving_guard.device_ownership import DeviceClaim, OwnerLease

#: A run that was passed over so often goes next, whatever its priority.
PASSES: Final = 8
#: Runs whose newest lease is remembered.
_RUNS: Final = 256
#: A lease that was not heard of for so long is forgotten: a store that was wiped counts from one again.
_REMEMBERED_S: Final = 600.0


class Seat(Struct, frozen=True):
    """One process of a trainer on this host."""

    pid: int
    started: int  # clock ticks since boot: tells it from a later process with its pid


class TurnTrainer(Struct, frozen=True, kw_only=True):
    """Who asks for turns."""

    lease: OwnerLease
    seats: tuple[Seat, ...]
    priority: int = 0


class Turn(Struct, frozen=True, kw_only=True):
    number: int
    trainer: TurnTrainer
    began: float


class _Queued:
    def __init__(self, trainer: TurnTrainer, since: float) -> None:
        self.trainer, self.since, self.passed = trainer, since, 0


class TurnOrder:
    """`now` is in seconds of any one clock. A trainer in its turn may be silent for `silent_s`, be without a stream for
    `rejoin_s`, and keep the turn for `turn_s`; 0: for ever."""

    def __init__(
        self,
        now: float,
        *,
        silent_s: float,
        rejoin_s: float,
        turn_s: float,
        number: int = 0,
        turn: Turn | None = None,
    ) -> None:
        """`number`: of the newest turn of the guard's former life; `turn`: that one, if it had not ended. Its time
        counts from now on: its trainer may have given it back when nobody listened."""
        self._silent_s, self._rejoin_s, self._turn_s = silent_s, rejoin_s, turn_s
        self._number, self._turn = number, replace(turn, began=now) if turn is not None else None
        self._lost = ""  # why the turn is lost
        self._rejoins_by: float | None = now + rejoin_s if turn is not None else None
        self._claims: dict[str, DeviceClaim] = {}  # by run
        self._heard: dict[str, float] = {}
        self._queued: dict[str, _Queued] = {}
        self._served: dict[str, int] = {}  # number of a run's last turn
        self._newest: dict[str, tuple[OwnerLease, float]] = {}

    @property
    def turn(self) -> Turn | None:
        return self._turn

    @property
    def number(self) -> int:
        """Of the newest turn."""
        return self._number

    @property
    def lost(self) -> str:
        """Why the trainer has lost its turn, which has not ended yet; empty: it has not."""
        return self._lost

    def queue(self, now: float) -> list[TurnTrainer]:
        """Those that wait, in the order of their turns."""
        waiting = [one for run_id, one in self._queued.items() if now - self._heard[run_id] <= self._silent_s]
        return [one.trainer for one in sorted(waiting, key=self._place)]

    def claim(self, now: float, trainer: TurnTrainer, *, wants: bool) -> DeviceClaim:
        """Ask for turns by a new connection. Raises `Superseded` for an older lease of a run."""
        lease = trainer.lease
        newest, heard_at = self._newest.get(lease.run_id, (lease, now))
        rivals = newest.lease == lease.lease and newest.owner != lease.owner and lease.run_id in self._claims
        if rivals or (lease.lease < newest.lease and now - heard_at < _REMEMBERED_S):
            raise Superseded(f"run {lease.run_id} has a trainer with a newer lease on this device; step down")
        turn = self._turn
        if turn is not None and turn.trainer.lease.run_id == lease.run_id:
            if turn.trainer.seats == trainer.seats:
                self._turn, self._rejoins_by = replace(turn, trainer=trainer), None
            else:
                self._lost = "a newer trainer of its run has come"
        self._queued.pop(lease.run_id, None)
        claim = self._claims[lease.run_id] = DeviceClaim(lease)
        self.wish(now, claim, trainer, wants=wants)
        return claim

    def wish(self, now: float, claim: DeviceClaim, trainer: TurnTrainer, *, wants: bool) -> None:
        """The trainer lives, and wants the device or does not. Raises `Superseded` if another connection counts."""
        self.check(claim)
        run_id = claim.lease.run_id
        self._heard[run_id] = now
        self._remember(claim.lease, now)
        if self._has(trainer):
            if not wants:
                self._end()
        elif not wants:
            self._queued.pop(run_id, None)
        elif run_id in self._queued:
            self._queued[run_id].trainer = trainer
        else:
            self._queued[run_id] = _Queued(trainer, now)

    def check(self, claim: DeviceClaim) -> None:
        """Raises `Superseded` if another connection counts."""
        if self._claims.get(claim.lease.run_id) is not claim:
            raise Superseded(f"another trainer of run {claim.lease.run_id} takes its turns now; step down")

    def broke(self, now: float, claim: DeviceClaim) -> None:
        """The connection is over. A trainer in its turn may come back for a while."""
        run_id = claim.lease.run_id
        if self._claims.get(run_id) is not claim:
            return
        del self._claims[run_id]
        self._queued.pop(run_id, None)
        if self._turn is not None and self._turn.trainer.lease == claim.lease:
            self._rejoins_by = now + self._rejoin_s

    def gone(self) -> None:
        """No process of the trainer in its turn is left."""
        self._end()

    def review(self, now: float) -> Turn | None:
        """Find out whether the turn is lost, or begin the next one. Returns one that began."""
        if self._turn is not None:
            self._lost = self._lost or self._fault(self._turn, now)
            return None
        if not (waiting := self.queue(now)):
            return None
        trainer = waiting[0]
        run_id = trainer.lease.run_id
        del self._queued[run_id]
        for passed in waiting[1:]:
            self._queued[passed.lease.run_id].passed += 1
        self._number += 1
        self._served.pop(run_id, None)
        self._served[run_id] = self._number
        if len(self._served) > _RUNS:
            del self._served[next(iter(self._served))]
        self._turn = Turn(number=self._number, trainer=trainer, began=now)
        return self._turn

    def newest(self) -> Iterable[OwnerLease]:
        """The newest lease of each run."""
        return tuple(lease for lease, _ in self._newest.values())

    def remember(self, leases: Iterable[OwnerLease], now: float) -> None:
        """Refuse older leases of their runs from now on."""
        for lease in leases:
            self._remember(lease, now)

    def has(self, claim: DeviceClaim) -> bool:
        """Whether the connection's trainer has its turn, and has not lost it."""
        turn = self._turn
        counts = self._claims.get(claim.lease.run_id) is claim
        return counts and turn is not None and turn.trainer.lease == claim.lease and not self._lost

    def _has(self, trainer: TurnTrainer) -> bool:
        turn = self._turn
        return turn is not None and (turn.trainer.lease, turn.trainer.seats) == (trainer.lease, trainer.seats)

    def _fault(self, turn: Turn, now: float) -> str:
        if self._turn_s and now - turn.began > self._turn_s:
            return f"it kept its turn for longer than {self._turn_s:g} s"
        if self._rejoins_by is not None:
            return "its stream has ended in its turn" if now >= self._rejoins_by else ""
        silent_s = now - self._heard[turn.trainer.lease.run_id]
        return f"it was silent for {self._silent_s:g} s in its turn" if silent_s > self._silent_s else ""

    def _end(self) -> None:
        self._turn, self._lost, self._rejoins_by = None, "", None

    def _place(self, one: _Queued) -> tuple[bool, int, int, float]:
        served = self._served.get(one.trainer.lease.run_id, 0)
        return one.passed < PASSES, -one.trainer.priority, served, one.since

    def _remember(self, lease: OwnerLease, now: float) -> None:
        self._newest.pop(lease.run_id, None)
        self._newest[lease.run_id] = lease, now
        if len(self._newest) > _RUNS:
            del self._newest[next(iter(self._newest))]
