"""One cell of the fault matrix: who suffers what, when, and what is checked in the end."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ebbtide.types.run import Run
from tests.chaos.cluster import SCRIPT, Cluster
from tests.chaos.load import RUN, SPEC, Load
from tests.chaos.trainer import SUPERSEDED, all_requests
from tests.fakes.clocks import JumpingClock
from tests.fakes.links import Direction, Way
from tests.support.waiting import wait_until

#: Seconds in a cell's end for all rollouts: a gRPC keepalive, a patience and two back-offs may come before.
_SETTLE_S: Final = 90.0


class Cell(NamedTuple):
    victim: str  # worker, coordinator, redis, relay or trainer
    fault: str
    phase: str
    lasts: float = 0.0  # seconds, if not as long as that fault does

    def __str__(self) -> str:
        return f"{self.victim}-{self.fault}-{self.phase}"


class Scene:
    """A cluster with two workers, and a load on it: of this process, or of a trainer's where that is the victim."""

    def __init__(self, cluster: Cluster, cell: Cell) -> None:
        self.cluster, self.cell, self.lasts = cluster, cell, cell.lasts
        #: In a migration the worker in question is the one that rollouts move to.
        worker = "w2" if cell.phase == "migration" else "w1"
        self.victim = worker if cell.victim == "worker" else cell.victim
        self.clock: JumpingClock | None = None
        self.load: Load
        self._joined = 1 if cell.phase == "move" else 2

    async def boot(self) -> None:
        if self.cell.fault == "clock":
            self.clock = JumpingClock(self.cluster.directory)
            self.cluster.environment[self.victim] = self.clock.environment
        if self.cell.phase == "prefill":
            self.cluster.script = replace(SCRIPT, first_token_s=2.0)
        if self.cell.phase == "move":
            self.cluster.script = replace(SCRIPT, first_token_s=8.0, step_s=0.1)
        client = await self.cluster.boot(workers=self._joined, heartbeat_s=1.0, heartbeat_timeout_s=2.5)
        if self.victim == "trainer":
            await client.submit(SPEC, RUN)
            await self.trainer()
        else:
            self.load = await Load.begin(self.cluster, client)

    async def trainer(self, name: str = "trainer") -> None:
        where: dict[str, Any] = {
            service: await self.cluster.route(name, service) for service in ("coordinator", "relay")
        }
        await self.cluster.start(name, "tests.chaos.trainer", holder=name, **where)

    async def join(self) -> str:
        """One more worker; returns its name."""
        self._joined += 1
        await self.cluster.worker(name := f"w{self._joined}")
        return name

    async def revive(self) -> None:
        """Start the victim again, or who takes its place."""
        match self.cell.victim:
            case "worker":
                await self.join()
            case "coordinator":
                await self.cluster.coordinator()
            case "relay":
                await self.cluster.relay()
            case "redis":
                self.cluster.store()
            case "trainer":
                await self.trainer()

    def outward(self) -> list[Direction]:
        """Where all that the victim sends passes."""
        return [way.forth if caller == self.victim else way.back for caller, way in self._ways()]

    def inward(self) -> list[Direction]:
        return [way.back if caller == self.victim else way.forth for caller, way in self._ways()]

    def _ways(self) -> Iterator[tuple[str, Way]]:
        return ((pair[0], way) for pair, way in self.cluster.ways.items() if self.victim in pair)

    def start_more(self) -> asyncio.Task[None]:
        """More comes in while the violence lasts; a trainer that sleeps too long loses its place."""
        return asyncio.create_task(self._more())

    async def _more(self) -> None:
        if self.victim != "trainer":
            await self.load.submit(16)
            await self.load.publish(step=2)  # whoever goes on elsewhere labels its tokens differently
        elif self.cell.fault == "freeze":
            await self.trainer("rival")

    # -- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> Run:
        if self.victim == "trainer":
            await self._trained()
        await self.load.all_finished(_SETTLE_S)
        if self.cell.fault != "clock":
            await self.load.check_versions()
        run = await self.load.settle()
        if self.cell.fault in {"kill", "freeze", "slow", "clock"}:  # who is cut off goes on generating, for nobody
            self.load.check_losses()
        assert run.counters["attempts"] <= 2 * len(self.load.requests)
        return run

    async def _trained(self) -> None:
        """Wait for the trainer's end, and take its run over. One whose place was taken must have noticed."""
        trainers = [self.cluster.process[name] for name in ("trainer", "rival") if name in self.cluster.process]
        await wait_until(lambda: not any(one.running() for one in trainers), timeout=_SETTLE_S, what="their end")
        assert [one.returncode for one in trainers] in ([0], [SUPERSEDED, 0])
        self.load = await Load.claim(self.cluster, self.cluster.client(), all_requests())

    async def close(self) -> None:
        if hasattr(self, "load"):
            await self.load.close()
