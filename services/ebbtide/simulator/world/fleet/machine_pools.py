"""Plays a pool's machines: they come, boot, get notices, stall and are gone, as the scenario's seed says."""

from collections.abc import Callable
from functools import partial

from ebbtide.simulator.scenario.draws.machine_events import (
    MachineChange,
    MachineEvent,
    machine_events,
    machine_name,
    machine_speed,
)
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.world.books import SimulationBooks
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.virtual_time import VirtualTime

#: Makes a worker by its name and the speed of its machine.
NewWorker = Callable[[str, float], SimulatedWorker]


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
        #: Called with a worker whose machine is there, in place of booting it.
        self.came: Callable[[SimulatedWorker], None] = lambda worker: worker.boot(pool.boot_s)

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
