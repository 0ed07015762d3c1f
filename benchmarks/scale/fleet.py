"""A process of lasting workers. Beside the orders of `benchmarks.control_plane.fleet` it follows these:

{"do": "arrive", "workers": 250, "slots": 64, "within_s": 5}  begin so many, evenly spread; answers when all attached
{"do": "recover", "after": 123.4}  answers once all have attached since then, and some tokens were acknowledged after an
                                   attach: when the last one attached, and when the first tokens were
{"do": "vanish", "share": 0.5}     so many break their streams at once and do not come back
{"do": "held"}                     how many tokens of each rollout were acknowledged
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import uvloop

from benchmarks.control_plane.fleet import Fleet, serve
from benchmarks.control_plane.worker import Worker
from benchmarks.scale.lasting_worker import LastingWorker
from ebbtide.runtime import race
from tests.support.waiting import wait_until

#: An arrival or a return that takes longer has failed.
_PATIENCE_S: Final = 120.0
#: How often the loop's lateness is looked at.
_LAG_S: Final = 0.05
#: So long are workers awaited that have to come back.
_RETURN_S: Final = 40.0


class ScaleFleet(Fleet):
    """`prefix`: of its workers' names."""

    def __init__(self, address: str, prefix: str) -> None:
        self._prefix = prefix
        self._refills: list[float] = []
        self._attached_at: dict[str, float] = {}  # worker -> when it attached first, or first since `recover`
        self._gone: dict[str, tuple[str, int]] = {}  # rollouts of workers that vanished -> run, tokens acknowledged
        self._lost_tokens = 0
        self._lag_s = 0.0
        self._awaited, self._first_answer = False, 0.0
        super().__init__(address)

    @property
    def worker_rate(self) -> float:
        return self._rate / max(1, len(self._workers))

    async def watch_lag(self) -> None:
        """Note by how much this process' own loop is late: so late are its workers' heartbeats, too."""
        while True:
            due = time.monotonic() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lag_s = max(self._lag_s, time.monotonic() - due)

    # -- what workers tell ---------------------------------------------------------------------------------------

    def attached(self, name: str) -> None:
        self._attached_at.setdefault(name, time.monotonic())
        self._awaited = True

    def answered(self, tokens: int, seconds: float) -> None:
        super().answered(tokens, seconds)
        if self._awaited and not self._first_answer:
            self._first_answer = time.monotonic()

    def refilled(self, seconds: float) -> None:
        self._refills.append(seconds)

    def lost_tokens(self, count: int) -> None:
        self._lost_tokens += count

    # -- what the benchmark asks ---------------------------------------------------------------------------------

    def orders(self) -> dict[str, Callable[..., Any]]:
        return super().orders() | {
            "arrive": self.arrive,
            "recover": self.recover,
            "vanish": self.vanish,
            "held": self.held,
        }

    def _made(self, name: str, slots: int) -> Worker:
        return LastingWorker(self, f"{self._prefix}{name}", self._address, self._token, slots)

    async def arrive(self, workers: int, slots: int, within_s: float) -> dict[str, Any]:
        before, new = time.monotonic(), []
        for number in range(workers):
            await asyncio.sleep(max(0.0, before + within_s * number / workers - time.monotonic()))
            new.append(self._begin(slots).name)
        return await self._attached(new, before)

    async def recover(self, after: float) -> dict[str, Any]:
        self._attached_at.clear()
        self._awaited, self._first_answer = False, 0.0
        found = await self._attached([name for name, one in self._workers.items() if not one.silent], after, _RETURN_S)
        await wait_until(lambda: self._first_answer > after, _PATIENCE_S, interval=0.02, what="tokens acknowledged")
        return found | {"answered": self._first_answer}

    async def _attached(self, names: list[str], after: float, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        def missing() -> int:
            return sum(self._attached_at.get(name, 0.0) <= after for name in names)

        with suppress(TimeoutError):
            await wait_until(lambda: not missing(), patience_s, interval=0.02)
        last = max((self._attached_at.get(name, after) for name in names), default=after)
        return {"last": last, "missing": missing()}

    def vanish(self, share: float) -> dict[str, Any]:
        alive = [worker for worker in self._workers.values() if not worker.silent]
        lost = alive[: round(share * len(alive))]
        at = time.monotonic()
        for worker in lost:
            self._losses.add(worker.name)
            self._gone |= _held(worker)
            worker.vanish()
        return {"workers": [worker.name for worker in lost], "at": at}

    def held(self) -> dict[str, Any]:
        found = dict(self._gone)
        for worker in self._workers.values():
            found |= _held(worker)
        return {"held": found}

    def measure(self) -> dict[str, Any]:
        refills, self._refills = self._refills, []
        lag = {"longest_lag_s": self._lag_s}
        self._lag_s = 0.0
        return super().measure() | lag | {"refills": refills, "lost_tokens": self._lost_tokens}


def _held(worker: Worker) -> dict[str, tuple[str, int]]:
    """Run and acknowledged tokens of each rollout."""
    return {one.attempt.rollout_id: (one.attempt.run_id, one.stored) for one in worker.rollouts.values()}


if __name__ == "__main__":

    async def main() -> None:
        fleet = ScaleFleet(sys.argv[1], sys.argv[2])
        await race(serve(fleet), fleet.watch_lag())

    uvloop.run(main())
