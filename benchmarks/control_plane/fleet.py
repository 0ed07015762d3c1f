"""The workers' process: told what to do by JSON lines on stdin, one answer a line on stdout.

{"do": "open", "workers": 100, "slots": 64}   attach so many more; answers when all are ready
{"do": "pace", "rate": 200000}                tokens/s of all together from now on
{"do": "measure"}                             what was seen since the last measure
{"do": "silence"}                             one worker says nothing any more
"""

import asyncio
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import uvloop

from benchmarks.control_plane.worker import Worker


class Fleet:
    """All workers, and what was seen. Times are the machine's monotonic clock, which other processes share."""

    def __init__(self, address: str) -> None:
        self._address, self._token = address, os.environ["EBBTIDE_TOKEN"]
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = 0
        self._rate = 0.0
        self._forget()
        self._losses = set[str]()  # workers that were to be lost
        self.running = 0

    def _forget(self) -> None:
        self._since, self._tokens = time.monotonic(), 0
        self._answers: list[float] = []
        self._failures: list[str] = []
        self._cpu = time.process_time()

    # -- what workers tell ---------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        return self._rate / max(1, self.running)

    def answered(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._answers.append(seconds)

    def failed(self, what: str) -> None:
        self._failures.append(what)

    # -- what it is told to do ----------------------------------------------------------------------------------

    async def open(self, workers: int, slots: int) -> dict[str, Any]:
        new = [self._begin(slots) for _ in range(workers)]
        async with asyncio.timeout(60):
            for worker in new:
                await worker.ready.wait()
        return {"workers": len(self._workers)}

    def _begin(self, slots: int) -> Worker:
        """One worker more."""
        self._opened += 1
        worker = self._made(f"w{self._opened}", slots)
        self._workers[worker.name] = worker
        task = asyncio.create_task(self._run(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return worker

    def _made(self, name: str, slots: int) -> Worker:
        return Worker(self, name, self._address, self._token, slots)

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - what ended it is a finding, unless it was to be lost
            if worker.name not in self._losses:
                self.failed(f"{worker.name}: {error!r}")
                print(f"{worker.name}: {error!r}", file=sys.stderr, flush=True)
        self._workers.pop(worker.name, None)

    def pace_at(self, rate: float) -> dict[str, Any]:
        self._rate = rate
        return {}

    def measure(self) -> dict[str, Any]:
        now = time.monotonic()
        found = {
            "seconds": now - self._since,
            "tokens": self._tokens,
            "answers": self._answers,
            "failures": self._failures,
            "running": self.running,
            "cpu_s": time.process_time() - self._cpu,
        }
        self._forget()
        return found

    def silence(self) -> dict[str, Any]:
        """Have a worker fall silent that has been there for some time; says which."""
        worker = random.choice(
            [one for one in self._workers.values() if not one.silent and one.name not in self._losses]
        )
        self._losses.add(worker.name)
        worker.silent = True
        return {"worker": worker.name}

    def orders(self) -> dict[str, Callable[..., Any]]:
        """What it can be told to do, by name."""
        return {"open": self.open, "pace": self.pace_at, "measure": self.measure, "silence": self.silence}


class Orderly(Protocol):
    """What follows orders."""

    def orders(self) -> dict[str, Callable[..., Any]]: ...


async def serve(fleet: Orderly) -> None:
    """Follow the orders on stdin until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        answer = fleet.orders()[order.pop("do")](**order)
        print(json.dumps(await answer if inspect.isawaitable(answer) else answer), flush=True)


if __name__ == "__main__":

    async def main() -> None:
        await serve(Fleet(sys.argv[1]))

    uvloop.run(main())
