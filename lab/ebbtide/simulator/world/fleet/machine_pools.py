"""Plays a pool's machines: they come, boot, are lent, get notices, stall and are gone, by seed and planned faults."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

from ebbtide.simulator.outcome import SimulationBooks
from ebbtide.simulator.scenario.input_tables import GrantTape
from ebbtide.simulator.scenario.machine_events import (
    MachineChange,
    MachineEvent,
    machine_events,
    machine_name,
    machine_speed,
)
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario, struck
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.training.simulated_trainer import SimulatedTrainer
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


class PlannedFaults:
    def __init__(
        self,
        faults: Sequence[PlannedFault],
        seed: int,
        time: VirtualTime,
        pools: Mapping[str, MachinesOfPool],
        trainers: Mapping[str, SimulatedTrainer],
    ) -> None:
        self._seed, self._time, self._pools, self._trainers = seed, time, pools, trainers
        self._in_steps: dict[tuple[str, int], list[tuple[int, PlannedFault]]] = {}
        for index, fault in enumerate(faults):
            if fault.step is None:
                time.at(fault.at_s, partial(self._strike, index, fault))
            else:
                self._in_steps.setdefault((self._run_of(fault), fault.step), []).append((index, fault))

    def step_opened(self, run: str, step: int) -> None:
        """Plan the faults that count from a step's begin."""
        for index, fault in self._in_steps.pop((run, step), ()):
            self._time.after(fault.at_s, partial(self._strike, index, fault))

    def _run_of(self, fault: PlannedFault) -> str:
        return fault.run if fault.run is not None else next(iter(self._trainers))

    def _strike(self, index: int, fault: PlannedFault) -> None:
        if fault.kind == "trainer":
            self._trainers[self._run_of(fault)].lose(fault.for_s)
            return
        pools = [self._pools[fault.pool]] if fault.pool is not None else list(self._pools.values())
        owners = {machine: pool for pool in pools for machine in pool.present}
        for machine in struck(fault, index, list(owners), self._seed):
            self._strike_one(fault, owners[machine], machine)

    def _strike_one(self, fault: PlannedFault, pool: MachinesOfPool, machine: str) -> None:
        worker = pool.present[machine]
        match fault.kind:
            case "freeze" | "partition":
                worker.freeze(fault.for_s)
                return
            case "slow":
                worker.slow_down(fault.speed, fault.for_s)
                return
            case "drain":
                worker.doom(fault.for_s)
                self._time.after(fault.for_s, lambda: self._take(fault, pool, machine))
            case _:
                self._take(fault, pool, machine)

    def _take(self, fault: PlannedFault, pool: MachinesOfPool, machine: str) -> None:
        """The machine is gone, unless it was before; another comes in its place if the fault says so."""
        if machine not in pool.present:
            return
        pool.lose(machine, silently=fault.kind != "crash")
        if fault.back_s is not None:
            self._time.after(fault.back_s, pool.replace)
