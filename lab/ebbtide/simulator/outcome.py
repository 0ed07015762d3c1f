"""Keeps a simulation's books, and records what it came to: steps, tokens, cost, and a timeline.

Invariant: a machine that is there is in exactly one state. Its time counts for its pool, and spans of one state in a
row are one span.
"""

from typing import Final

from msgspec import Struct

from ebbtide.simulator.engines.simulated_engine import SimulatedEngine


class StepOutcome(Struct, frozen=True, kw_only=True):
    """One training step. Times in seconds since the scenario's begin."""

    run: str
    step: int
    opened_s: float  # its first rollout could be submitted
    generated_s: float  # its last rollout ended
    trained_s: float  # the optimiser's step was done
    rollouts: int
    tokens: int  # of its responses
    tail_s: float  # from the end of nine tenths of its rollouts to the end of the last one


class PoolOutcome(Struct, frozen=True, kw_only=True):
    """One pool of like workers, or one run's trainer. Seconds are sums over its machines."""

    pool: str
    machine_s: float  # machines were there, booting ones too
    busy_s: float  # an engine generated or read prompts, a trainer trained
    booting_s: float = 0.0
    installing_s: float = 0.0
    held_s: float = 0.0  # the host of a borrowed worker did not lend it
    cost: float = 0.0  # dollars
    losses: int = 0
    drains: int = 0

    @property
    def idle_share(self) -> float:
        """Share of the machines' time in which they neither worked, booted, installed nor served users."""
        idle = self.machine_s - self.busy_s - self.booting_s - self.installing_s - self.held_s
        return max(0.0, idle / self.machine_s) if self.machine_s else 0.0


class TokenCounts(Struct, kw_only=True):
    generated: int = 0  # all that engines sampled
    kept: int = 0  # of responses that ended
    lost: int = 0  # sampled, and gone before they were stored
    twice: int = 0  # sampled again because they were lost
    moved: int = 0  # already made when a rollout went on at another worker
    read: int = 0  # prompts and partial responses that engines prefilled
    reread: int = 0  # of those, what an engine had read before
    dropped: int = 0  # of responses that were abandoned on purpose


class Span(Struct, frozen=True, kw_only=True):
    """What a machine did for a while, for the timeline."""

    machine: str
    pool: str
    state: str  # "booting", "installing", "generating", "training", "idle", "held", "lost"
    begin_s: float
    end_s: float
    run: str = ""


class Outcome(Struct, kw_only=True):
    """What one simulated run of a scenario with one seed came to."""

    scenario: str
    seed: int
    simulated_s: float
    steps: list[StepOutcome]
    pools: list[PoolOutcome]
    tokens: TokenCounts
    moves: int = 0
    resumes: int = 0  # attempts beyond a rollout's first
    preemptions: int = 0  # by engines, for want of KV memory
    installs: int = 0
    weight_bytes: int = 0  # of versions, over all links
    unfinished: int = 0  # rollouts that had not ended when the scenario's time was up
    spans: list[Span] = []
    fleet: list[tuple[float, str, int]] = []  # (second, pool, machines that are there from then on)


class SimulationProgress(Struct, frozen=True, kw_only=True):
    """How far a simulation has come, for people who wait for it."""

    at_s: float  # simulated seconds since the scenario's begin
    until_s: float = 0.0  # its end; 0: it ends with its last step
    steps: int = 0  # trained so far, of all runs
    of_steps: int = 0  # 0: it ends with its time

    @property
    def share(self) -> float:
        """Of the way, from 0 to 1; the nearer of both ends counts."""
        shares = [done / whole for done, whole in ((self.at_s, self.until_s), (self.steps, self.of_steps)) if whole]
        return min(1.0, max(shares, default=0.0))


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
