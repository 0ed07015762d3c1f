"""Has borrowed workers step when their hosts' guards grant it, and at the speed that is left beside served requests."""

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from random import Random

from ebbtide.simulator.scenario.draws.served_recording import served_recording
from ebbtide.simulator.scenario.inputs.pace_table import PaceTable
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.serving.grant_tape import GrantSpell
from ebbtide.simulator.serving.pair_costs import named_costs
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.served_host import GrantTapes, ServedHost, ServedTraffic, borrowed_state
from ebbtide.simulator.world.books import SimulationBooks
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.types.fleet import BorrowedState


class BorrowedMachines:
    """The hosts of a pool. Hosts share what was played of their traffic."""

    def __init__(
        self, pool: MachinePool, scenario: Scenario, seed: int, time: VirtualTime, books: SimulationBooks
    ) -> None:
        serving = pool.serving
        if serving is None:
            raise ValueError(f"pool {pool.name} is borrowed and serves nobody")
        self._time, self._books, self._seed, self._until_s = time, books, seed, scenario.until_s
        found = served_recording(serving, scenario.tables.served, pool.name, seed)
        self._traffic = ServedTraffic(
            requests=tuple(TrafficRequest(one.at_s, one.prompt, one.output) for one in found.requests),
            seconds=found.seconds,
            paces=_paces(serving.paces, scenario.tables.paces),
            shift_s=0.0 if serving.alike else inf,
            window_s=min(120.0, found.seconds),
        )
        self._costs = named_costs(serving.costs, Path(scenario.folder))
        self._slo = serving.slo.targets()
        self._tapes = GrantTapes(self._traffic, self._costs, self._slo, seed=seed)

    def lend(self, worker: SimulatedWorker) -> None:
        """Let a worker's host serve its users from now on."""
        number = Random(f"{self._seed} host {worker.name}").getrandbits(48)
        host = ServedHost(self._traffic, self._costs, self._slo, number, tapes=self._tapes)
        BorrowedDevice(worker, host.spells(self._time.now, self._until_s), self._time, self._books).go_on()


class BorrowedDevice:
    """One host's device, from spell to spell."""

    def __init__(
        self, worker: SimulatedWorker, spells: Iterator[GrantSpell], time: VirtualTime, books: SimulationBooks
    ) -> None:
        self._worker, self._spells, self._time, self._books = worker, spells, time, books
        self._spell: GrantSpell | None = None
        worker.borrowed = self._state

    def _state(self) -> BorrowedState | None:
        return borrowed_state(self._spell, self._time.now) if self._spell is not None else None

    def go_on(self) -> None:
        """End the present spell and begin the next."""
        if self._worker.gone:
            return
        ended, spell = self._spell, next(self._spells, None)
        if ended is not None:
            self._books.served += ended.requests
            self._books.attained += ended.attained
        if spell is None:
            return
        changed = self._spell is None or spell.granted is not self._spell.granted
        self._spell = spell
        if spell.granted:
            self._worker.pace(spell.share)
            self._worker.host.go_on("reclaimed")
        else:
            self._worker.host.hold("reclaimed")
        if changed:
            self._worker.beat()
        self._time.at(spell.end_s, self.go_on)


def _paces(name: str | None, tables: Mapping[str, PaceTable]) -> tuple[tuple[float, float], ...]:
    if name is None:
        return ((0.0, 1.0),)
    return tuple(zip(tables[name].times_s, tables[name].factors, strict=True))
