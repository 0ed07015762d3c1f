"""What a coordinator's decisions were handed is recorded, and a replay elsewhere takes the very same decisions."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.worker import Rollout, Watcher
from benchmarks.scale.lasting_worker import MeteredWorker
from ebbtide.testing import wait_until
from ebbtide.v1 import fleet_pb2
from tests.integration.coordinator.conftest import TOKEN

PLACED: Final = 2_000


class Pace(Watcher):
    """One worker's speed. What else workers tell is of no interest."""

    def __init__(self, tokens_per_s: float) -> None:
        self.running, self._pace = 0, tokens_per_s
        self.placements = 0

    @property
    def pace(self) -> float:
        return self._pace

    def placed(self, rollout_id: str, now: float) -> None:
        self.placements += 1

    def answered(self, tokens: int, seconds: float) -> None:
        pass

    def resumed(self, rollout_id: str, now: float) -> None:
        pass

    def failed(self, what: str) -> None:
        pass


class DrainingWorker(MeteredWorker):
    """Tells how fast it really is, and can leave with notice."""

    @property
    def pace(self) -> Pace:
        assert isinstance(self._fleet, Pace)
        return self._fleet

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
        released = fleet_pb2.Released(attempts=[one.attempt], reason="drain")
        self._say.put_nowait(fleet_pb2.WorkerMessage(released=released))


class Crew:
    """Workers of several speeds."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.workers: dict[str, DrainingWorker] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def hire(self, name: str, tokens_per_s: float) -> None:
        worker = self.workers[name] = DrainingWorker(Pace(tokens_per_s), name, self._address, TOKEN, 24)
        self._tasks.append(asyncio.create_task(worker.run()))
        await worker.ready.wait()

    @property
    def placed(self) -> int:
        return sum(worker.pace.placements for worker in self.workers.values())

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.vanish()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def replay(path: Path) -> dict[str, Any]:
    """In a process of its own, whose sets have another order."""
    command = [sys.executable, "-m", "ebbtide.simulator.decision_replay", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.stdout, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (found["first_difference"] is not None)
    return found


async def test_every_placement_of_a_live_run_with_two_kills_and_a_drain_is_taken_again(
    cluster_with: Any, tmp_path: Path
) -> None:
    path = tmp_path / "decisions"
    async with cluster_with(record_decisions=str(path), heartbeat_timeout_s=1.0, heartbeat_s=0.2) as cluster:
        address = cluster.server.address
        drivers = [Driver(address, TOKEN, run_id=name, lengths=(2, 24)) for name in ("one", "two")]
        crew = Crew(address)
        for driver in drivers:
            await driver.start()
            driver.want(160)
        for number, speed in enumerate((40.0, 60.0, 80.0, 100.0, 60.0, 80.0)):
            await crew.hire(f"w{number}", speed)
        await placed(crew, PLACED // 4)
        crew.workers["w1"].vanish()
        await placed(crew, PLACED // 2)
        crew.workers["w2"].silent = True
        cluster.coordinator.fleet.drain("w3", 5.0)
        await crew.workers["w3"].leave()
        await crew.hire("w6", 100.0)
        await placed(crew, PLACED + 200)
        await crew.close()
        for driver in drivers:
            driver.check()
            assert not driver.lost_tokens
            await driver.close()
    found = await asyncio.to_thread(replay, path)
    assert found["first_difference"] is None
    assert found["placements"] == found["placements_equal"] >= PLACED
    assert found["decisions"] == found["decisions_equal"] > 0
    assert found["placements_added"] == found["decisions_added"] == 0


async def placed(crew: Crew, count: int) -> None:
    await wait_until(lambda: crew.placed >= count, 60, interval=0.02, what=f"{count} rollouts placed")
