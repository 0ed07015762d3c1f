"""Plays a pool's machines: they come, boot, are lent, get notices, stall and are gone, as the scenario's seed says."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from ebbtide.simulator.scenario.draws.machine_events import (
    MachineChange,
    MachineEvent,
    machine_events,
    machine_name,
    machine_speed,
)
from ebbtide.simulator.scenario.inputs.grant_tape import GrantTape
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.world.books import SimulationBooks
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.types.fleet import BorrowedState

#: Makes a worker by its name and the speed of its machine.
NewWorker = Callable[[str, float], SimulatedWorker]
#: A worker's heartbeats say that it may not generate once it has stood still for so long (rollout_worker.guard_link).
HELD_S: Final = 0.25


class MachinesOfPool:
    """Invariant: `present` has the machines that are there, from the begin of their boot."""

    def __init__(
        self,
        pool: MachinePool,
        scenario: Scenario,
        seed: int,
        time: VirtualTime,
        books: SimulationBooks,
        new: NewWorker,
    ) -> None:
        self.pool, self._time, self._books, self._new, self._seed = pool, time, books, new, seed
        self._prices = scenario.price(pool)
        self._events = iter(machine_events(scenario, pool, seed))
        self._since: dict[str, float] = {}
        self._extra = 0
        self.present: dict[str, SimulatedWorker] = {}
        #: Called with a worker whose machine is there.
        self.came: Callable[[SimulatedWorker], None] = self._boot
        self._grants = scenario.tables.grants[pool.grants.file] if pool.grants is not None else None

    def _boot(self, worker: SimulatedWorker) -> None:
        worker.boot(self.pool.boot_s)
        if self._grants is not None and self.pool.grants is not None:
            place = 0.0 if self.pool.grants.alike else Random(f"{self._seed} host {worker.name}").random()
            BorrowedMachine(worker, self._grants, place, self._time).go_on()

    def begin(self) -> None:
        """Plan the next event. Each one plans the one behind it: a scenario may be long, and end early."""
        event = next(self._events, None)
        if event is not None:
            self._time.at(event.at_s, partial(self._play, event))

    def _play(self, event: MachineEvent) -> None:
        self.begin()
        worker = self.present.get(event.machine)
        match event.change:
            case MachineChange.COMES:
                self.add(event.machine)
            case MachineChange.NOTICE if worker is not None:
                worker.doom(event.for_s)
            case MachineChange.STALLS if worker is not None:
                worker.freeze(event.for_s)
            case MachineChange.GONE if worker is not None:
                self.lose(event.machine)
            case _:
                pass  # a planned fault took it before

    def add(self, machine: str) -> None:
        """A machine comes."""
        self._since[machine] = self._time.now
        self.present[machine] = worker = self._new(machine, machine_speed(self.pool, machine, self._seed))
        self.came(worker)

    def replace(self) -> None:
        """A machine comes in place of one that a planned fault took."""
        until_s = self.pool.until_s
        if until_s is not None and self._time.now >= until_s:
            return
        self._extra += 1
        machine = machine_name(self.pool.name, "again", str(self._extra))
        self.add(machine)
        if until_s is not None:
            self._time.at(until_s, lambda: self.lose(machine) if machine in self.present else None)

    def lose(self, machine: str, *, silently: bool = True) -> None:
        """A machine is gone. `silently`: see `SimulatedWorker.vanish`."""
        worker = self.present.pop(machine)
        worker.vanish(silently=silently)
        self._pay(machine)

    def settle(self) -> None:
        """Pay for what is there until now."""
        for machine in list(self._since):
            self._pay(machine)

    def _pay(self, machine: str) -> None:
        self._books.pay(self.pool.name, self._prices.cost(self._since.pop(machine), self._time.now))


class BorrowedMachine:
    """A machine whose host lends it as a tape says. In place of the guard's forecast, heartbeats tell what is usual."""

    def __init__(self, worker: SimulatedWorker, tape: GrantTape, place: float, time: VirtualTime) -> None:
        """`place`: where in the tape the machine begins, from 0 to 1."""
        self._worker, self._tape, self._time = worker, tape, time
        self._spells = tape.spells(place * tape.end_s)
        self._granted: bool | None = None
        self._since_s = 0.0
        self._share = tape.granted_share
        worker.borrowed = self._state

    def _state(self) -> BorrowedState:
        granted = bool(self._granted)
        return BorrowedState(
            granted=granted or self._time.now - self._since_s <= HELD_S,
            share=self._share,
            spell_s=self._tape.usual_s(granted=granted),
        )

    def go_on(self) -> None:
        """Begin the next spell."""
        if self._worker.gone:
            return
        seconds, share = next(self._spells)
        changed, self._granted = self._granted is not (share > 0.0), share > 0.0
        if self._granted:
            self._worker.pace(share)
            self._worker.host.go_on("reclaimed")
        else:
            self._worker.host.hold("reclaimed")
        if changed:
            self._since_s = self._time.now
            self._worker.beat()
        self._time.at(self._time.now + seconds, self.go_on)
