"""A process of workers whose rollouts are made at a stream's pace: so many tokens each two seconds.

It follows the orders of `benchmarks.control_plane.fleet`. A short rollout is made at once, so that the time of a short
completion is that of everything but an engine. All responses are the script of `large_model`.
"""

import asyncio
import heapq
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.control_plane.fleet import Fleet, serve
from benchmarks.control_plane.worker import Rollout, Worker
from benchmarks.gateway.stream_plan import ENTRIES, EVENT_S, EVENT_TOKENS, SCRIPT, SHORT
from ebbtide.types.tokens import TOKEN_BYTES, pack_tokens, token_count
from ebbtide.v1 import fleet_pb2

#: A rollout's first tokens, and the whole of a short one, are sent so long after it was assigned.
_FIRST_S: Final = 0.01
#: What a worker sends leaves it together within so long, as a real one's urgent tokens do.
_TOGETHER_S: Final = 0.02


class StreamWorker(Worker):
    """`packed`: the script, as messages carry it."""

    def __init__(self, fleet: Fleet, name: str, address: str, token: str, slots: int, packed: bytes) -> None:
        super().__init__(fleet, name, address, token, slots)
        self._packed = packed

    def _attach(self) -> fleet_pb2.WorkerMessage:
        message = super()._attach()
        message.attach.engine.vocab_size = ENTRIES
        return message

    def _pace(self) -> float:
        return EVENT_TOKENS / EVENT_S

    def _begin(self, assignment: fleet_pb2.Assignment, now: float) -> None:
        start = token_count(assignment.partial)
        one = Rollout(assignment.attempt, assignment.sampling.max_tokens, start, start, float(start), now)
        one.stored = start
        self.rollouts[one.attempt.attempt_id] = one
        self._fleet.running += 1
        self._hurry(one, now + _FIRST_S)

    def _tick(self) -> None:
        now, loop = time.monotonic(), asyncio.get_running_loop()
        parts = []
        while self._urgent and self._urgent[0][0] <= now:
            due, _, one = heapq.heappop(self._urgent)
            if one.attempt.attempt_id not in self.rollouts:
                continue
            first = not one.made
            one.made = float(one.end if one.end <= SHORT else min(one.end, one.made + EVENT_TOKENS))
            parts.append(one)
            if one.made < one.end:  # the second event comes at any time: streams that begin together do not keep step
                heapq.heappush(self._urgent, (due + EVENT_S * (random.random() if first else 1.0), id(one), one))
        if parts:
            self._send(now, parts)
        self._when = max(now + _TOGETHER_S, self._urgent[0][0] if self._urgent else now + 1.0)
        self._timer = loop.call_at(self._when, self._tick)

    def _response(self, first: int, end: int) -> bytes:
        return self._packed[first * TOKEN_BYTES : end * TOKEN_BYTES]


class StreamFleet(Fleet):
    """`script`: the token ids that each rollout gets, and `version`, the policy version that is said to make them."""

    def __init__(self, address: str, script: "np.ndarray[Any, Any]", version: int) -> None:
        super().__init__(address)
        self._packed = pack_tokens(script, np.full(len(script), -0.5), version)

    def _made(self, name: str, slots: int) -> Worker:
        return StreamWorker(self, name, self._address, self._token, slots, self._packed)


if __name__ == "__main__":

    async def main() -> None:
        address, model, version = sys.argv[1:]
        await serve(StreamFleet(address, np.load(Path(model) / SCRIPT), int(version)))

    uvloop.run(main())
