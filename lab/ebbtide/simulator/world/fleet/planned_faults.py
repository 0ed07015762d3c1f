"""Plays a scenario's planned faults: at named times, or at times within a step."""

from collections.abc import Mapping, Sequence
from functools import partial

from ebbtide.simulator.scenario.fault_plan import PlannedFault, struck
from ebbtide.simulator.world.fleet.machine_pools import MachinesOfPool
from ebbtide.simulator.world.training.simulated_trainer import SimulatedTrainer
from ebbtide.simulator.world.virtual_time import VirtualTime


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
