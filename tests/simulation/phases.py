"""Watching for the moment at which a fault is to strike."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from tests.simulation.faults import Breaker, Cell, Fault, draw
from tests.simulation.loop import Proc
from tests.simulation.network import Wire
from tests.simulation.world import World

#: A phase that does not come within so many virtual seconds is given up.
_PATIENCE_S: Final = 60.0
#: A message on the append stream that is larger carries tokens.
_BARE_MESSAGE: Final = 40
#: Calls whose messages change what the store has.
_WRITING: Final = frozenset({
    "Append", "Submit", "CompleteEpisodes", "Acknowledge", "CommitTrajectories", "Cancel", "AnnounceVersion",
})  # fmt: skip


class Watcher:
    """Waits for phases, one at a time: `who` is the process in which it is seen, if it is in one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted = ""
        self._skip = 0
        self._seen: asyncio.Future[str] | None = None
        self._message: asyncio.Future[Wire] | None = None
        self._pass = 0
        self._flushes: list[asyncio.Future[str]] = []
        world.taps.append(self._frame)
        world.ears.append(self._engine)
        world.monitor.on_state = self._state

    async def phase(self, phase: str, skip: int) -> str | None:
        """Wait for it; the name of the process that is in it ("" for none), or None if it does not come."""
        self._wanted, self._skip = phase, skip
        self._seen = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not self._seen.done() and phase == "idle":
                    if self._idle():
                        return ""
                    await asyncio.sleep(0.05)
                return await self._seen
        except TimeoutError:
            return None
        finally:
            self._wanted = ""

    async def message(self, skip: int) -> Wire:
        """The wire on which the next message travels that changes something, after `skip` others."""
        self._message = asyncio.get_running_loop().create_future()
        self._pass = skip
        return await self._message

    async def flush(self) -> str:
        """The next worker that sends tokens."""
        flush: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flushes.append(flush)
        return await flush

    def _travels(self, wire: Wire, method: str, kind: str) -> None:
        waits = self._message is not None and not self._message.done()
        if waits and kind == "message" and method.rpartition("/")[2] in _WRITING:
            if self._pass:
                self._pass -= 1
            elif self._message is not None:
                self._message.set_result(wire)

    def wants(self, phase: str) -> bool:
        return self._wanted == phase

    def _idle(self) -> bool:
        rollouts = self._world.monitor.rollouts
        names = [name for name, one in rollouts.items() if one.rollout_id in one.run.journal.requests]
        return bool(names) and all(rollouts[name].state in {"", "finished"} for name in names)

    def _occurs(self, phase: str, who: str) -> None:
        if phase == self._wanted and self._seen is not None and not self._seen.done():
            if self._skip:
                self._skip -= 1
            else:
                self._seen.set_result(who)

    def _engine(self, proc: Proc, version: int) -> None:
        self._occurs("decode" if version else "prefill", proc.name)

    def _frame(self, source: Proc, wire: Wire, method: str, kind: str, data: bytes) -> None:
        self._travels(wire, method, kind)
        if method.endswith("/Append") and kind == "message" and source.name[0] == "w" and len(data) > _BARE_MESSAGE:
            self._occurs("mid-flush", source.name)
            flushes, self._flushes = self._flushes, []
            for flush in flushes:
                flush.set_result(source.name)
        elif kind == "open" and method.endswith(("/FetchTiles", "/GetManifest")):
            self._occurs("mid-weight-pull", source.name)

    def _state(self, _name: str, before: str, after: str) -> None:
        if (before, after) == ("running", "queued"):
            self._occurs("mid-migration", "")


#: A fault whose victim has nothing to strike at that moment (no connection, say) is brought again so often.
_TRIES: Final = 3
_AGAIN_S: Final = 5.0


class Chaos:
    """Brings a seed's faults upon the world, and knows which cells it has visited."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._faults = world, draw(seed)
        self._watcher, self.breaker = Watcher(world), Breaker(world)
        self.struck: list[Cell] = []

    async def run(self) -> None:
        """Ends when all has been done and undone."""
        world, loop = self._world, self._world.loop
        loop.outside.spawn(self._break_connections(), "broken connections")
        if loop.random.random() < 0.5:
            loop.outside.spawn(self._lose_store(), "lost store")
        if world.plan.forgetful:
            loop.outside.spawn(self._forget_store(), "forgetful store")
        if world.plan.standby and loop.random.random() < 0.6:
            loop.outside.spawn(self._unseat_leader(), "unseated leader")
        await asyncio.sleep(loop.random.uniform(0.0, 1.5))
        missed = [fault for fault in self._faults if not await self._bring(fault, alone=fault.alone)]
        for fault in missed:
            for _ in range(_TRIES):
                if await self._bring(fault, alone=True):
                    break
                await asyncio.sleep(_AGAIN_S)
        await asyncio.sleep(max(0.0, self.breaker.until - loop.now))
        world.calm_at, world.outlook.calm = loop.now, True

    async def _bring(self, fault: Fault, *, alone: bool) -> bool:
        """Wait for a fault's phase, and strike. Whether both could be."""
        cell, world = fault.cell, self._world
        if alone:
            await asyncio.sleep(max(0.0, self.breaker.until - world.loop.now) + world.loop.random.uniform(0.0, 1.0))
        world.outlook.waited_for = cell.phase != "idle"
        if cell.phase == "mid-migration":
            world.loop.outside.spawn(self._migrate(), "migrations")
        who = await self._watcher.phase(cell.phase, fault.skip)
        world.outlook.waited_for = False
        if who is None:
            world.note("missed", str(cell))
            return False
        await asyncio.sleep(fault.lag)
        name = self._target(cell, who)
        world.note("fault", f"{cell} strikes {name}")
        if not self.breaker.strike(cell.kind, name):
            return False
        self.struck.append(cell)
        if name == "redis" and cell.kind in {"SIGSTOP", "partition", "half-open"} and world.loop.random.random() < 0.6:
            # A worker is lost while the store does not answer: what it had sent is still on its way.
            await asyncio.sleep(world.loop.random.uniform(0.0, 2.0))
            kind = world.loop.random.choice(("SIGKILL", "half-open", "SIGSTOP"))
            self.breaker.strike(kind, self._target(msgspec.structs.replace(cell, component="worker"), who))
        return True

    async def _break_connections(self) -> None:
        """Now and then a connection is reset while a message, its answer, or a command for the store is on its way."""
        world, chance = self._world, self._world.loop.random
        for _ in range(chance.choice((0, 3, 6, 10))):
            await asyncio.sleep(chance.uniform(0.2, 5.0))
            if world.outlook.calm:
                return
            wire = await self._watcher.message(chance.randrange(4))
            if chance.random() < 0.3:
                wire = next((one for one in world.network.wires if one.procs[1].name == "redis"), wire)
            await asyncio.sleep(chance.uniform(0.0, 0.006))
            if any(wire.open):
                world.network.disturbed = world.loop.now
                world.note("break", f"{wire.procs}")
                if chance.random() < 0.5:  # answers get lost for a while, what is asked for is done
                    wire.vanishing[1] = True
                    wire.judge()
                    await asyncio.sleep(chance.uniform(0.1, 1.5))
                world.network.disturbed = world.loop.now
                wire.break_at(chance.randrange(2), "connection reset by peer")

    async def _lose_store(self) -> None:
        """Once, perhaps: what the coordinator asks of the store is lost, or late, and a worker dies meanwhile."""
        world, chance = self._world, self._world.loop.random
        await asyncio.sleep(chance.uniform(0.5, 20.0))
        who = await self._watcher.flush()
        late = chance.random() < 0.5
        for wire in [wire for wire in world.network.wires if wire.procs[1].name == "redis"]:
            world.note("break", f"{wire.procs} says nothing any more")
            if late:
                wire.stalled = True
                world.loop.outside.spawn(self._come_late(wire), "late commands")
            else:
                wire.vanishing[0] = True
                world.loop.outside.after(chance.uniform(3.5, 8.0), wire.break_at, 0, "connection reset by peer")
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        self.breaker.strike(chance.choice(("SIGKILL", "SIGKILL", "half-open")), who)

    async def _unseat_leader(self) -> None:
        """Freeze the leader, or cut it off from the store, until the other coordinator leads; then it wakes up."""
        world, chance = self._world, self._world.loop.random
        for _ in range(chance.choice((1, 1, 2))):
            await asyncio.sleep(chance.uniform(0.5, 15.0))
            await self._watcher.flush()
            await asyncio.sleep(chance.choice((0.0, chance.uniform(0.0, 0.006))))
            if world.outlook.calm:
                return
            name, seconds = world.leader, chance.uniform(3.0, 9.0)
            if world.proc[name].alive:
                how = chance.choice((self.breaker.freeze, self.breaker.freeze, self.breaker.cut_off))
                world.note("fault", f"{name} is unseated by {how.__name__} for {seconds:.3f} s")
                world.interruptions += 1
                how(name, seconds)

    async def _forget_store(self) -> None:
        """Kill the store, which loses its newest, in the middle of whatever goes on."""
        world, chance = self._world, self._world.loop.random
        for _ in range(chance.choice((1, 2, 3))):
            await asyncio.sleep(chance.uniform(1.0, 20.0))
            if world.outlook.calm:
                return
            await self._watcher.message(chance.randrange(4))
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            self.breaker.strike("SIGKILL", "redis")

    async def _come_late(self, wire: Wire) -> None:
        """Let a stalled connection's commands through once its client has another one, or after a while."""
        loop, network = self._world.loop, self._world.network
        until = loop.now + 30.0
        while loop.now < until:
            await asyncio.sleep(0.05)
            if any(one.procs == wire.procs and one is not wire for one in network.wires):
                break
        await asyncio.sleep(loop.random.uniform(0.0, 2.0))
        wire.flow()

    def _target(self, cell: Cell, who: str) -> str:
        if cell.component == "coordinator":
            return self._world.leader
        if cell.component == "trainer":
            trainers = self._world.trainers
            return self._world.loop.random.choice([one for one in trainers if self._world.proc[one].alive] or trainers)
        if cell.component != "worker":
            return cell.component
        workers = [name for name in self._world.workers if self._world.proc[name].alive]
        return who if who in workers else self._world.loop.random.choice(workers or self._world.workers)

    async def _migrate(self) -> None:
        """Make rollouts move, until it is seen: a notice, or a kill, of a worker that has some."""
        world = self._world
        wants = True
        while wants:
            await asyncio.sleep(world.loop.random.uniform(0.2, 2.0))
            wants = self._watcher.wants("mid-migration")
            busy = [name for name in world.workers if world.proc[name].alive and self._has_work(world.proc[name])]
            if busy and wants:
                how: Callable[[str], None] = world.loop.random.choice((world.terminate, world.terminate, world.kill))
                how(world.loop.random.choice(busy))

    def _has_work(self, proc: Proc) -> bool:
        monitor = self._world.monitor
        return any(
            one.state == "running" and monitor.owner.get(one.attempt) is proc for one in monitor.rollouts.values()
        )
