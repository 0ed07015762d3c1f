"""A live fleet whose decisions are recorded: two workers are killed, one drains, and another comes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from benchmarks.control_plane.worker import Rollout, Watcher
from benchmarks.scale.lasting_worker import MeteredWorker
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.support.waiting import wait_until

#: Rollouts that are placed, at least.
PLACED: Final = 2_000
_PATIENCE_S: Final = 120.0


class Pace(Watcher):
    """One worker's speed. What else workers tell is of no interest."""

    def __init__(self, tokens_per_s: float) -> None:
        self.running, self._pace = 0, tokens_per_s
        self.placements = 0

    @property
    def pace(self) -> float:
        return self._pace

    def answered(self, tokens: int, seconds: float) -> None:
        pass

    def failed(self, what: str) -> None:
        pass


class DrainingWorker(MeteredWorker):
    """Tells how fast it really is, and can leave with notice."""

    @property
    def pace(self) -> Pace:
        if not isinstance(self._fleet, Pace):
            raise TypeError("a draining worker has a pace of its own")
        return self._fleet

    def _begin(self, assignment: fleet_pb2.Assignment, now: float) -> None:
        self.pace.placements += not assignment.partial
        super()._begin(assignment, now)

    def _heartbeat(self) -> fleet_pb2.Heartbeat:
        beat = super()._heartbeat()
        beat.tokens_generated = int(self._up_s * self.pace.pace * 8)
        return beat

    async def leave(self) -> None:
        for one in list(self.rollouts.values()):
            one.releasing = True
            self._hurry(one, time.monotonic())
        await wait_until(lambda: not self.rollouts, what="all is handed over")
        self.vanish()

    def _release(self, one: Rollout) -> None:
        self._forget(one.attempt.attempt_id)
        released = fleet_pb2.Released(attempts=[one.attempt], reason="drain", cause=types_pb2.END_CAUSE_WORKER_LEAVES)
        self._say.put_nowait(fleet_pb2.WorkerMessage(released=released))


class Crew:
    """Workers of several speeds."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self.workers: dict[str, DrainingWorker] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def hire(self, name: str, tokens_per_s: float) -> None:
        worker = self.workers[name] = DrainingWorker(Pace(tokens_per_s), name, self._address, self._token, 24)
        self._tasks.append(asyncio.create_task(worker.run()))
        await worker.ready.wait()

    async def until(self, placed: int) -> None:
        """Wait until so many rollouts were placed."""
        await wait_until(lambda: self.placed >= placed, _PATIENCE_S, interval=0.02, what=f"{placed} rollouts placed")

    @property
    def placed(self) -> int:
        return sum(worker.pace.placements for worker in self.workers.values())

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.vanish()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def befall(crew: Crew, drain: Callable[[], Awaitable[None]]) -> None:
    """Hire workers of several speeds, lose two, drain `w3`, and hire another, while rollouts are placed."""
    for number, speed in enumerate((40.0, 60.0, 80.0, 100.0, 60.0, 80.0)):
        await crew.hire(f"w{number}", speed)
    await crew.until(PLACED // 4)
    crew.workers["w1"].vanish()
    await crew.until(PLACED // 2)
    crew.workers["w2"].silent = True
    await drain()
    await crew.workers["w3"].leave()
    await crew.hire("w6", 100.0)
    await crew.until(PLACED + 200)
