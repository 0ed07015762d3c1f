"""The fault matrix: what breaks, how, and in the middle of what; which cells a seed draws; and the breaking itself."""

import itertools
import random
from typing import Final

from msgspec import Struct

from tests.simulation.loop import Proc
from tests.simulation.world import World

COMPONENTS: Final = ("worker", "coordinator", "redis", "relay", "trainer")
KINDS: Final = ("SIGKILL", "SIGSTOP", "slow", "half-open", "partition", "clock jump")
PHASES: Final = ("idle", "prefill", "decode", "mid-flush", "mid-weight-pull", "mid-migration")

STOPPED_S: Final = 30.0
#: Seconds that each handle of a slow process takes: ten times what it takes anywhere, and more.
_SLOW: Final = {"redis": (0.001, 0.02), "coordinator": (0.0002, 0.003), "standby": (0.0002, 0.003)}
_SLOW_OTHERS: Final = (0.0005, 0.01)


class Cell(Struct, frozen=True, order=True):
    component: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"{self.component} {self.kind} {self.phase}"


CELLS: Final = tuple(itertools.starmap(Cell, itertools.product(COMPONENTS, KINDS, PHASES)))
#: Cells that each seed draws in turn, so that few seeds visit all of them; the rest of its faults are chance.
IN_TURN: Final = 5


class Fault(Struct, frozen=True):
    """`skip`: so many times its phase is let pass first; `lag`: seconds from then; `alone`: wait until all is well."""

    cell: Cell
    skip: int
    lag: float
    alone: bool


def draw(seed: int) -> list[Fault]:
    """The faults of a seed, in the order in which they are waited for."""
    chance = random.Random(seed ^ 0xFA17)
    order = list(CELLS)
    random.Random(0).shuffle(order)
    cells = [order[(seed * IN_TURN + number) % len(order)] for number in range(IN_TURN)]
    cells += [chance.choice(CELLS) for _ in range(chance.choice((0, 0, 1, 3)))]
    chance.shuffle(cells)
    return [
        Fault(
            cell=cell,
            skip=chance.choice((0, 0, 1, 3)) if cell.phase not in {"idle", "mid-weight-pull", "mid-migration"} else 0,
            lag=chance.choice((0.0, chance.uniform(0.0, 0.004), chance.uniform(0.0, 0.05))),
            alone=chance.random() < 0.5,
        )
        for cell in cells
    ]


class Breaker:
    """Does to the world what a fault says, and undoes it when its time is over. `until`: when all is well again."""

    def __init__(self, world: World) -> None:
        self._world, self._loop, self._chance = world, world.loop, world.loop.random
        self.until = 0.0

    def strike(self, kind: str, name: str) -> bool:
        """Returns whether there was something to strike."""
        world, proc = self._world, self._world.proc[name]
        if not proc.alive:
            return False
        world.interruptions += 1
        proc.struck |= kind != "SIGKILL"
        if kind == "SIGKILL":
            world.kill(name)
            self._lasts(4.0)
        elif kind == "SIGSTOP":
            self._stop(name)
        elif kind == "slow":
            proc.cost = _SLOW.get(name, _SLOW_OTHERS)
            self._for(self._chance.uniform(5.0, 15.0), lambda: setattr(proc, "cost", None))
        elif kind == "half-open":
            ways = self._chance.choice(((0,), (1,), (0, 1)))
            if not world.network.half_open(proc, ways=ways):
                return False
            self._lasts(16.0)
        elif kind == "partition":
            self._partition(name)
        else:
            proc.clock += self._chance.choice((-1, 1)) * self._chance.choice((5.0, 3600.0, 30 * 86400.0))
        return True

    def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        proc, network = self._world.proc[name], self._world.network
        proc.struck = True
        proc.stop()
        network.judge()

        def wake() -> None:
            proc.go_on()
            network.judge()

        self._for(seconds, wake)

    def cut_off(self, name: str, seconds: float) -> None:
        """Keep a process and the store from each other; everybody else still reaches both."""
        network = self._world.network
        self._world.proc[name].struck = True
        cuts = ((name, "redis"), ("redis", name))
        for source, target in cuts:
            network.cut(source, target)

        def mend() -> None:
            for source, target in cuts:
                network.mend(source, target)

        self._for(seconds, mend)

    def _stop(self, name: str) -> None:
        proc = self._world.proc[name]
        self.freeze(name, STOPPED_S)
        if name not in {"redis", "relay"} and self._chance.random() < 0.5:
            self._loop.outside.after(self._chance.uniform(2.0, 20.0), self._take_place, proc)

    def _take_place(self, proc: Proc) -> None:
        """A supervisor starts another process in place of one that does not answer. It ends a coordinator that it
        replaced once it can: one that lives on keeps the fleet's lease, though nobody reaches it at its address.
        """
        if proc.alive and self._world.proc[proc.name] is proc:
            self._world.start(proc.name, beside=True)
            if proc.name in {"coordinator", "standby"}:
                well_s = max(self.until - self._loop.now, 0.0)
                self._for(well_s + self._chance.uniform(0.0, 20.0), lambda: self._world.end(proc))

    def _partition(self, name: str) -> None:
        network, chance = self._world.network, self._chance
        others = [other for other in self._world.proc if other != name]
        peers = others if chance.random() < 0.6 else [chance.choice(others)]
        ways = chance.choice(("both", "both", "from", "to"))
        cuts = [(name, other) for other in peers if ways != "to"] + [(other, name) for other in peers if ways != "from"]
        for source, target in cuts:
            network.cut(source, target)

        def mend() -> None:
            for source, target in cuts:
                network.mend(source, target)

        self._for(chance.uniform(1.0, 25.0), mend)
        if name in {"coordinator", "standby", *self._world.journals} and chance.random() < 0.3:
            self._loop.outside.after(chance.uniform(2.0, 10.0), self._take_place, self._world.proc[name])

    def _for(self, seconds: float, undo: "object") -> None:
        assert callable(undo)
        self._loop.outside.after(seconds, undo)
        self._lasts(seconds)

    def _lasts(self, seconds: float) -> None:
        self.until = max(self.until, self._loop.now + seconds)
