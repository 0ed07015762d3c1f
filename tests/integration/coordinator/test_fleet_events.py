"""Half the fleet gone, all of it gone, and a fleet that comes and goes."""

import asyncio
from typing import Any

from ebbtide.v1 import types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = 12  # tokens of a response, three at a time


class Generating:
    """Drives a worker: each of its rollouts gets three tokens per turn."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.made: dict[str, int] = {}
        self.task = asyncio.create_task(self._generate())

    async def _generate(self) -> None:
        while True:
            deltas = []
            for name, assignment in list(self.worker.assigned.items()):
                at = self.made.setdefault(name, len(assignment.partial) // 12)
                deltas.append(self.worker.delta(name, at, 3, STOP if at + 3 >= LENGTH else 0))
                self.made[name] = at + 3
                if at + 3 >= LENGTH:
                    del self.worker.assigned[name], self.made[name]
            await self.worker.send(*deltas)
            await asyncio.sleep(0.05)

    async def die(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.worker.break_streams()


async def test_a_run_without_workers_says_so_and_goes_on_when_one_comes(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1")
    await run.submit("a", "b")
    await first.has("a", "b")
    await first.add("a", 0, 3)
    await first.break_streams()
    (warning,) = await run.events("warning", 1)
    assert "none is attached" in warning.message
    assert warning.values["rollouts"] == 2
    assert (await run.get()).message == "waits for workers: none is attached"
    await run.announce(step=1)  # the trainer goes on meanwhile
    late = await cluster.worker("w2")
    await late.has("a", "b")
    assert late.installed[0] == 2  # the newest weights come before the work
    assert len(late.assigned["a"].partial) == 3 * 12
    assert (await run.get()).message == ""
    await late.send(late.delta("a", 3, 1, STOP), late.delta("b", 0, 1, STOP))
    assert await run.count("finished") == 2


async def test_half_of_the_fleet_may_go_at_once(cluster: Any) -> None:
    run = await cluster.run()
    workers = [Generating(await cluster.worker(f"w{number}", slots=16)) for number in range(4)]
    await run.submit(*(f"r{number}" for number in range(64)))
    await wait_until(lambda: all(one.made for one in workers), what="all are at work")
    await asyncio.gather(*(one.die() for one in workers[:2]))
    await done(run, 64)
    assert await run.count("attempts") < 2 * 64
    for one in workers[2:]:
        await one.die()


async def test_a_fleet_that_comes_and_goes_causes_no_storm_of_attempts(cluster: Any) -> None:
    run = await cluster.run()
    workers = [Generating(await cluster.worker(f"w{number}", slots=8)) for number in range(3)]
    number, pending = 3, {f"r{number}" for number in range(120)}
    while pending:
        some = [pending.pop() for _ in range(min(20, len(pending)))]
        await run.submit(*some)
        await wait_until(lambda: all(one.made for one in workers), what="all are at work")
        await workers.pop(0).die()
        workers.append(Generating(await cluster.worker(f"w{number}", slots=8)))
        number += 1
    await done(run, 120)
    counters = (await run.get()).counters
    assert 120 < counters["attempts"] < 2 * 120
    assert sum(n for name, n in counters.items() if name.startswith("attempts:le:")) == 120
    for one in workers:
        await one.die()


async def done(run: Any, count: int) -> None:
    async def finished() -> bool:
        return bool(await run.count("finished") == count)

    await wait_until(finished, 30.0, what=f"{count} rollouts are finished")
