"""Keeps what a simulation came to: tokens, machine time by state, steps, and spans for the timeline.

Invariant: a machine that is there is in exactly one state. Its time counts for its pool, and spans of one state in a
row are one span.
"""

from typing import Final

from msgspec import Struct

from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from ebbtide.simulator.outcome import PoolOutcome, Span, StepOutcome, TokenCounts

#: Machines per pool, and spans in all, that a timeline can show. Further ones count, but leave no span.
_DRAWN_MACHINES: Final = 64
_DRAWN_SPANS: Final = 40_000
#: A state in which a machine earns nothing. A machine that is gone is in no state.
GONE: Final = ""


class _Machine(Struct):
    pool: str
    state: str
    since: float
    drawn: bool
    run: str = ""


class _Pool(Struct):
    machines: int = 0
    named: int = 0
    seconds: dict[str, float] = {}
    cost: float = 0.0
    losses: int = 0
    drains: int = 0


class SimulationBooks:
    def __init__(self) -> None:
        self.tokens = TokenCounts()
        self.steps: list[StepOutcome] = []
        self.spans: list[Span] = []
        self.fleet: list[tuple[float, str, int]] = []
        self.moves = self.resumes = self.installs = self.preemptions = 0
        self._machines: dict[str, _Machine] = {}
        self._pools: dict[str, _Pool] = {}

    def enter(self, machine: str, pool: str, state: str, now: float, run: str = "") -> None:
        """Note that a machine is in a state from now on; `GONE`: that it is there no longer."""
        known = self._machines.get(machine)
        if known is not None:
            if (known.state, known.run) == (state, run):
                return
            self._close(machine, known, now)
        books = self._pools.setdefault(pool, _Pool())
        if state == GONE:
            if self._machines.pop(machine, None) is not None:
                self._count(pool, books, -1, now)
            return
        if known is None:
            books.named += 1
            self._count(pool, books, 1, now)
            known = _Machine(pool, state, now, books.named <= _DRAWN_MACHINES, run)
        self._machines[machine] = _Machine(pool, state, now, known.drawn, run)

    def lose(self, pool: str, *, drained: bool) -> None:
        """Count a machine that left: lost, or drained in time."""
        books = self._pools.setdefault(pool, _Pool())
        books.losses += not drained
        books.drains += drained

    def retire(self, engine: SimulatedEngine) -> None:
        """Count what an engine has done that is no longer there."""
        self.tokens.generated += engine.generated
        self.tokens.read += engine.read
        self.tokens.reread += engine.reread
        self.preemptions += engine.preemptions

    def pay(self, pool: str, dollars: float) -> None:
        self._pools.setdefault(pool, _Pool()).cost += dollars

    def machines(self, pool: str) -> int:
        """How many machines of a pool are there now."""
        return self._pools[pool].machines if pool in self._pools else 0

    def pools(self, now: float) -> list[PoolOutcome]:
        """The pools' accounts until now."""
        for name, machine in self._machines.items():
            self._close(name, machine, now)
            machine.since = now
        return [_outcome(name, books) for name, books in sorted(self._pools.items())]

    def _count(self, pool: str, books: _Pool, more: int, now: float) -> None:
        books.machines += more
        self.fleet.append((now, pool, books.machines))

    def _close(self, name: str, machine: _Machine, now: float) -> None:
        lasted = now - machine.since
        if lasted <= 0:
            return
        seconds = self._pools[machine.pool].seconds
        seconds[machine.state] = seconds.get(machine.state, 0.0) + lasted
        if machine.drawn and len(self.spans) < _DRAWN_SPANS:
            begin_s, state, run = machine.since, machine.state, machine.run
            self.spans.append(Span(machine=name, pool=machine.pool, state=state, begin_s=begin_s, end_s=now, run=run))


def _outcome(name: str, books: _Pool) -> PoolOutcome:
    seconds = books.seconds
    return PoolOutcome(
        pool=name,
        machine_s=sum(seconds.values()),
        busy_s=seconds.get("generating", 0.0) + seconds.get("training", 0.0),
        booting_s=seconds.get("booting", 0.0),
        installing_s=seconds.get("installing", 0.0),
        held_s=seconds.get("held", 0.0),
        cost=books.cost,
        losses=books.losses,
        drains=books.drains,
    )
