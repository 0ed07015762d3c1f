"""A whole fleet in virtual time: `python -m tests.simulation.crowd --workers 1000 --slots 64 --queued 100000`.

The real coordinator decides for scripted workers and drivers on the simulated network. Redis is a real one, which is
asked while virtual time stands still. So the load costs the coordinator nothing: what its callbacks take, and what it
remembers, is its own. Prints one line of JSON. Nothing is broken here; seeds do that.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import hiredis
import structlog
from msgspec import Struct

from benchmarks.control_plane.fleet import Fleet
from benchmarks.control_plane.worker import Worker
from benchmarks.scale.growth import FinishingDriver, slope
from benchmarks.scale.lasting_worker import MeteredWorker
from benchmarks.scale.loop_probe import LoopProbe
from ebbtide.auth.security import ServerSettings
from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.rpc.server import Server
from tests.simulation import store
from tests.simulation.loop import Proc, SimLoop
from tests.simulation.network import Network
from tests.simulation.patches import patched
from tests.simulation.store import connect
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

_ADDRESS: Final = "127.0.0.1:7600"
_TOKEN: Final = "crowd"
_PATIENCE_S: Final = 3600.0
#: Points over which memory has to stay as it is.
_POINTS: Final = 5
#: Tokens/s at which rollouts end soon.
_FAST: Final = 1e7
#: What leads away from the coordinator's own objects.
_FOREIGN: Final = (
    types.ModuleType, types.FunctionType, types.CodeType, type, asyncio.AbstractEventLoop, asyncio.Future,
    asyncio.Handle, Server,
)  # fmt: skip


class CrowdPlan(Struct, frozen=True, kw_only=True):
    """`rate`: tokens/s of each worker; `seconds`: virtual ones under load. `finished`: so many more than all
    that are open end at last; 0: what is open stays so."""

    workers: int = 1000
    slots: int = 64
    queued: int = 100_000
    runs: int = 20
    rate: float = 6.0
    seconds: float = 5.0
    finished: int = 0
    lengths: tuple[int, int] = (1, 200)


class CrowdLoop(SimLoop):
    """Measures the handles of one process, and keeps no task."""

    def __init__(self, probe: LoopProbe) -> None:
        super().__init__(seed=1)
        self._probe = probe
        self.measured: Proc | None = None

    def _make_task(self, _loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(work, loop=self, **options)

    def _run_proc(self, proc: Proc) -> None:
        if proc is not self.measured:
            super()._run_proc(proc)
            return
        while proc.ready:
            handle = proc.ready.popleft()
            if handle._cancelled:
                continue
            callback: Any = handle._callback  # type: ignore[attr-defined]
            began = time.thread_time()
            handle._run()
            owner = getattr(callback, "__self__", None)
            self._probe.ran(time.thread_time() - began, callback, owner if isinstance(owner, asyncio.Task) else None)


class RealStore(store.Server):
    """Passes commands on to a real Redis, at no virtual time."""

    def __init__(self, loop: SimLoop, network: Network, redis: EmbeddedRedis) -> None:
        super().__init__(loop, network, lambda _: None, lambda *_: None)
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(str(redis.socket))
        self._reader = hiredis.Reader()

    def execute(self, command: list[bytes]) -> bytes:
        self._link.sendall(hiredis.pack_command(cast("tuple[bytes]", tuple(command))))
        said = b""
        while True:
            part = self._link.recv(1 << 20)
            said += part
            self._reader.feed(part)
            if self._reader.gets() is not False:
                return said

    def close(self) -> None:
        super().close()
        self._link.close()


class MeteredFleet(Fleet):
    def _made(self, name: str, slots: int) -> Worker:
        return MeteredWorker(self, name, self._address, self._token, slots)


class Crowd:
    def __init__(self, plan: CrowdPlan, redis: EmbeddedRedis) -> None:
        self._plan, self._redis, self.probe = plan, redis, LoopProbe()
        self.loop = CrowdLoop(self.probe)
        self.network = Network(self.loop, lambda *_: None)
        self.store = RealStore(self.loop, self.network, redis)
        self.loop.connect = lambda factory, _host, port: connect(self.loop, self.network, factory, port)
        self.figures: dict[str, Any] = {"workers": plan.workers}
        self.phases: dict[str, Any] = {}
        self._drivers: list[FinishingDriver] = []

    async def run(self) -> None:
        self.store.start(Proc("redis", self.loop))
        head = self.loop.measured = Proc("coordinator", self.loop)
        await head.spawn(self._serve(head), "serve")
        self._fleet = MeteredFleet(_ADDRESS)
        load = Proc("load", self.loop)
        phases = (self._arrive, self._fill, self._work, self._lose_half)
        for phase in (*phases, self._finish) if self._plan.finished else phases:
            gc.collect()
            self.probe.reset()
            began = time.thread_time()
            await load.spawn(phase(), phase.__name__)
            seen = self.probe.read() | {"took_s": round(time.thread_time() - began, 1)}
            self.phases[phase.__name__.strip("_")] = seen
        self._conclude()

    async def _serve(self, head: Proc) -> None:
        server = ServerSettings(listen=_ADDRESS, token=_TOKEN)
        settings = CoordinatorSettings(server=server, store_url="redis://127.0.0.1:6379/0")
        self.coordinator = Coordinator(settings)
        services = await self.coordinator.open(_ADDRESS)
        self._server = Server(server, services)
        await self._server.start()
        for name, work in self.coordinator.loops().items():
            head.spawn(work, name)
        await self._server.set_serving(True)

    async def _arrive(self) -> None:
        plan = self._plan
        for number in range(plan.runs):
            self._drivers.append(FinishingDriver(_ADDRESS, _TOKEN, run_id=f"r{number}", lengths=plan.lengths))
            await self._drivers[-1].start()
        await self._fleet.open(plan.workers, plan.slots)

    async def _fill(self) -> None:
        plan, before = self._plan, remembered_bytes(self.coordinator)
        live = plan.workers * plan.slots
        self._fleet.pace_at(plan.rate * plan.workers)
        for driver in self._drivers:
            driver.want((live + plan.queued) // plan.runs)
        open_ = (live + plan.queued) // plan.runs * plan.runs

        def filled() -> bool:
            return self._fleet.running >= live * 0.98 and sum(len(one.unfinished) for one in self._drivers) == open_

        await wait_until(filled, _PATIENCE_S, interval=0.1, what="all slots taken")
        grown = remembered_bytes(self.coordinator) - before
        self.figures["coordinator_bytes_per_open"] = round(grown / open_, 1)

    async def _work(self) -> None:
        await asyncio.sleep(self._plan.seconds)
        for driver in self._drivers:
            driver.check()

    async def _lose_half(self) -> None:
        lost = list(self._fleet._workers.values())[: self._plan.workers // 2]
        for worker in lost:
            self._fleet._losses.add(worker.name)
            worker.vanish()
        queued = self._plan.queued

        def back() -> bool:
            return sum(len(run.queue) for run in self.coordinator.state.runs.values()) > queued * 0.9 + sum(
                worker._slots for worker in lost
            )

        await wait_until(back, 60, interval=0.05, what="all lost rollouts queued again")

    async def _finish(self) -> None:
        """Let all rollouts end, and more, until nothing is live: what is still remembered then has to stay small."""
        plan = self._plan
        self._fleet.pace_at(_FAST)
        for driver in self._drivers:
            driver.want(0)
        points = []
        for number in range(_POINTS):
            await wait_until(self._settled, _PATIENCE_S, interval=0.1, what="nothing live")
            points.append((self._finished, remembered_bytes(self.coordinator)))
            if number < _POINTS - 1:
                await self._end_more(plan.finished // (_POINTS - 1))
        finished, remembered = zip(*points, strict=True)
        self.figures["coordinator_bytes_per_finished"] = round(slope(finished, remembered), 2)
        self.figures["finished"] = finished[-1]

    async def _end_more(self, count: int) -> None:
        enough = self._finished + count
        for driver in self._drivers:
            driver.want(max(1, self._plan.workers * self._plan.slots // 4 // self._plan.runs))
        await wait_until(lambda: self._finished >= enough, _PATIENCE_S, interval=0.02, what="more finished rollouts")
        for driver in self._drivers:
            driver.want(0)

    @property
    def _finished(self) -> int:
        return sum(driver.finished for driver in self._drivers)

    def _settled(self) -> bool:
        return all(driver.settled for driver in self._drivers)

    def _conclude(self) -> None:
        phases, work = self.phases.values(), self.phases["work"]
        self.figures |= {
            "callback_p99_ms": max(one["callbacks"]["p99_ms"] for one in phases),
            "callback_max_ms": max(one["callbacks"]["max_ms"] for one in phases),
            "decision_p99_ms": max(one["decisions"]["p99_ms"] for one in phases),
            "decision_max_ms": max(one["decisions"]["max_ms"] for one in phases),
            "decisions_p99_at_work_ms": work["decisions"]["p99_ms"],
            "tokens_lost": sum(driver.lost_tokens for driver in self._drivers),
            "longest": {name: one["longest"][:3] for name, one in self.phases.items()},
            "took_s": {name: one["took_s"] for name, one in self.phases.items()},
        }


def remembered_bytes(root: object) -> int:
    """Bytes of all objects that `root` leads to, those of other programs and of the interpreter left out."""
    seen, total, front = {id(root)}, 0, [root]
    while front:
        total += sum(map(sys.getsizeof, front))
        found = []
        for one in gc.get_referents(*front):
            if id(one) not in seen and not isinstance(one, _FOREIGN):
                seen.add(id(one))
                found.append(one)
        front = found
    return total


@contextlib.contextmanager
def _quiet_world(crowd: Crowd) -> Iterator[None]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with patched(crowd.loop, crowd.network, lambda *_: None, lambda *_: None, lambda *_: None, None):
        yield


def simulate_crowd(plan: CrowdPlan, directory: Path) -> dict[str, Any]:
    """What came of it. Raises what went wrong."""
    os.environ["EBBTIDE_TOKEN"] = _TOKEN
    with EmbeddedRedis(directory) as redis:
        crowd = Crowd(plan, redis)
        gc.disable()  # the load's objects are no matter of the coordinator's
        asyncio.set_event_loop(crowd.loop)
        try:
            with _quiet_world(crowd):
                crowd.loop.run_until_complete(crowd.run())
                crowd.loop.bury()
        finally:
            gc.enable()
            asyncio.set_event_loop(None)
            crowd.store.close()
            crowd.loop.close()
    return crowd.figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.crowd", description=__doc__)
    usual = CrowdPlan()
    for name in ("workers", "slots", "queued", "runs", "rate", "seconds", "finished"):
        value = getattr(usual, name)
        parser.add_argument(f"--{name}", type=type(value), default=value)
    with tempfile.TemporaryDirectory(prefix="ebb-crowd-", dir="/dev/shm") as scratch:
        figures = simulate_crowd(CrowdPlan(**vars(parser.parse_args())), Path(scratch))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
