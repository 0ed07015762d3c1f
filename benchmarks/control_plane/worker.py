"""A worker that speaks both streams and makes tokens out of nothing, cheap enough that a hundred share a core.

Tokens of all rollouts are made at each flush, at the pace that the fleet gives. As with a real worker half a flush
window of tokens is sent, or what there is in time for the interval, and a first token and a finish go by themselves
within 20 ms.
"""

import asyncio
import heapq
import random
import time
from collections import deque
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from benchmarks.control_plane.responses import response
from ebbtide.auth.security import ClientSecurity
from ebbtide.rollout_worker.generation.outbox import JITTER
from ebbtide.rpc.channel import open_channel, write, write_first
from ebbtide.runtime import race
from ebbtide.types.fleet import PROTOCOL_VERSION, FlushWindow
from ebbtide.types.tokens import token_count
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub

OWN_WINDOW: Final = FlushWindow(32, 0.25)
_URGENT_S: Final = 0.02
#: Between two flushes, however fast tokens are made.
_LEAST_S: Final = 0.005
_PREFILL_S: Final = 0.03
_IN_FLIGHT: Final = 8


class Watcher(Protocol):
    """The fleet, as its workers see it. `pace`: tokens/s of each rollout at this moment."""

    running: int

    @property
    def pace(self) -> float: ...
    def answered(self, tokens: int, seconds: float) -> None: ...
    def failed(self, what: str) -> None: ...


class Rollout(Struct, eq=False):
    """`made` and `at`: tokens made by when, a fraction of one included; `sent`: those in messages; `stored`: those that
    were acknowledged. `number`: on the stream, 0 before it was told. `releasing`: it is to be handed back; `stopped`:
    its last tokens were sent.
    """

    attempt: fleet_pb2.AttemptRef
    end: int
    begin: int
    sent: int
    made: float
    at: float
    number: int = 0
    stored: int = 0
    ending: bool = False
    releasing: bool = False
    stopped: bool = False

    def advance(self, now: float, pace: float) -> int:
        """Make tokens until `now`; returns how many are unsent."""
        if now > self.at and not self.stopped:
            self.made = min(float(self.end), self.made + pace * (now - self.at))
            self.at = now
        return int(self.made) - self.sent


class Flight(NamedTuple):
    since: float
    tokens: int
    parts: list[Rollout]
    ends: list[int]


class Worker:
    """Open it with `run`; it ends by itself when its streams do."""

    def __init__(
        self, fleet: Watcher, name: str, address: str, token: str, slots: int, *, install_s: float = 0.0
    ) -> None:
        """`install_s`: what an install takes."""
        self.name, self._fleet, self._slots, self._install_s = name, fleet, slots, install_s
        self._channel = open_channel(address, ClientSecurity(token=token))
        self.rollouts: dict[str, Rollout] = {}
        self._urgent: list[tuple[float, int, Rollout]] = []
        self._numbers = 0
        self._flights: deque[Flight] = deque()
        self._sequence = 0
        self._out: asyncio.Queue[fleet_pb2.AppendRequest] = asyncio.Queue()
        self._say: asyncio.Queue[fleet_pb2.WorkerMessage] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._window = OWN_WINDOW
        self._due = self._when = time.monotonic() + random.uniform(0, OWN_WINDOW.interval_s)
        self._calls: tuple[Any, ...] = ()
        self._stub: Any = None
        self._lag = 0.0  # what an acknowledgement usually takes
        self.silent = False
        self.ready = asyncio.Event()

    def vanish(self) -> None:
        """Break both streams, as the end of the process does."""
        self.silent = True
        for call in self._calls:
            call.cancel()

    async def run(self) -> None:
        try:
            await self._session()
        finally:
            self._fleet.running -= len(self.rollouts)
            self.rollouts.clear()
            await self._channel.close()

    async def _session(self) -> None:
        if self._stub is None:
            self._stub = FleetStub(self._channel)
        self._calls = control, append = self._stub.Control(), self._stub.Append()
        try:
            await write_first(control, self._attach())
            attached = (await anext(aiter(control))).attached
            self._attached(attached)
            await write_first(append, fleet_pb2.AppendRequest(session=attached.session))
            self._arm()
            await race(
                self._read_control(control),
                self._read_append(append),
                self._write(control, self._say),
                self._write(append, self._out),
                self._beat(attached.heartbeat_s),
            )
        finally:
            if self._timer:
                self._timer.cancel()
            control.cancel()
            append.cancel()

    def _pace(self) -> float:
        """Tokens/s of each of its rollouts."""
        return self._fleet.pace

    def _attached(self, attached: fleet_pb2.Attached) -> None:
        self._window = OWN_WINDOW.stretched(attached.flush_interval_s)

    def _attach(self) -> fleet_pb2.WorkerMessage:
        engine = fleet_pb2.EngineInfo(model="scripted", vocab_size=1 << 16, max_model_len=1 << 16)
        return fleet_pb2.WorkerMessage(
            attach=fleet_pb2.Attach(
                worker_id=self.name,
                kind=types_pb2.WORKER_KIND_SPOT,
                protocol_version=PROTOCOL_VERSION,
                capabilities=["resume", "flush_interval", "engine:scripted"],
                slots=self._slots,
                engine=engine,
                flush_tokens=OWN_WINDOW.tokens,
                flush_interval_s=OWN_WINDOW.interval_s,
            )
        )

    async def _write(self, call: Any, queue: "asyncio.Queue[Any]") -> None:
        while True:
            await write(call, await queue.get())

    async def _beat(self, interval_s: float) -> None:
        await asyncio.sleep(random.uniform(0, interval_s))
        while True:
            if not self.silent:
                self._say.put_nowait(fleet_pb2.WorkerMessage(heartbeat=self._heartbeat()))
            await asyncio.sleep(interval_s)

    def _heartbeat(self) -> fleet_pb2.Heartbeat:
        return fleet_pb2.Heartbeat(state=types_pb2.WORKER_STATE_READY, tokens_per_s=self._pace() * len(self.rollouts))

    # -- control -------------------------------------------------------------------------------------------------

    async def _read_control(self, call: Any) -> None:
        async for message in call:
            if self.silent:
                continue
            now = time.monotonic()
            for assignment in message.assign.assignments:
                self._begin(assignment, now)
            for ref in message.cancel.attempts:
                self._forget(ref.attempt_id)
            for ref in message.release.attempts:
                if one := self.rollouts.get(ref.attempt_id):
                    one.releasing = True
                    self._hurry(one, now)
            if message.HasField("flush_interval"):
                self._window = OWN_WINDOW.stretched(message.flush_interval.least_s)
            if message.HasField("install"):
                done = fleet_pb2.Installed(version=message.install.version, run_id=message.install.run_id)
                asyncio.get_running_loop().call_later(self._install_s, self._installed, done)
        raise ConnectionError(f"{self.name}: control stream ended")

    def _installed(self, done: fleet_pb2.Installed) -> None:
        self._say.put_nowait(fleet_pb2.WorkerMessage(installed=done))
        self.ready.set()

    def _begin(self, assignment: fleet_pb2.Assignment, now: float) -> None:
        start = token_count(assignment.partial)
        one = Rollout(assignment.attempt, assignment.sampling.max_tokens, start, start, float(start), now + _PREFILL_S)
        one.stored = start
        self.rollouts[one.attempt.attempt_id] = one
        self._fleet.running += 1
        self._hurry(one, now + _PREFILL_S + _URGENT_S)

    def _forget(self, attempt_id: str) -> None:
        if self.rollouts.pop(attempt_id, None):
            self._fleet.running -= 1

    # -- append --------------------------------------------------------------------------------------------------

    def _hurry(self, one: Rollout, when: float) -> None:
        heapq.heappush(self._urgent, (when, id(one), one))
        if when < self._when:
            self._arm()

    def _arm(self, at: float = 0.0) -> None:
        if self._timer:
            self._timer.cancel()
        self._when = at or min(self._due, self._urgent[0][0] if self._urgent else self._due)
        self._timer = asyncio.get_running_loop().call_at(self._when, self._tick)

    def _tick(self) -> None:
        now, pace = time.monotonic(), self._pace()
        if self.silent:
            return None
        if len(self._flights) >= _IN_FLIGHT:
            return self._arm(now + 0.002)
        since, parts = now, []
        while self._urgent and self._urgent[0][0] <= now:
            since = min(since, self._urgent[0][0])
            one = heapq.heappop(self._urgent)[2]
            if one.attempt.attempt_id in self.rollouts:
                one.advance(now, pace)
                one.made = max(one.made, min(float(one.end), one.begin + 1.0 + random.random()))  # not all in step
                parts.append(one)
        if self._due <= now:
            since = min(since, self._due)
            parts = list(self.rollouts.values())
            flush_s = self._window.interval_s
            spare = max(flush_s / 2, flush_s - self._lag)
            full_s = max(_LEAST_S, self._window.tokens / 2 / max(pace, 1e-9))
            self._due = now + min(spare, flush_s * random.uniform(*JITTER), full_s)
            for one in parts:
                one.advance(now, pace)
                if not one.ending and one.end - one.made < pace * flush_s:
                    one.ending = True
                    self._hurry(one, now + (one.end - one.made) / max(pace, 1e-9) + _URGENT_S)
        if parts:
            self._send(since, parts)
        self._arm()
        return None

    def _send(self, since: float, parts: list[Rollout]) -> None:
        open_ = (one for one in parts if not one.stopped and one.sent < one.end)
        taken = [one for one in open_ if int(one.made) > one.sent or one.releasing]
        if not taken:
            return
        self._sequence += 1
        request = fleet_pb2.AppendRequest(sequence=self._sequence)
        ends = [int(one.made) for one in taken]
        for index, (one, end) in enumerate(zip(taken, ends, strict=True)):
            if not one.number:
                self._numbers = one.number = self._numbers % 1023 + 1
                request.opened.add(number=one.number, attempt=one.attempt)
            if end >= one.end:
                request.finishes.add(index=index, reason=types_pb2.FINISH_REASON_LENGTH)
        counts = [end - one.sent for one, end in zip(taken, ends, strict=True)]
        request.numbers.extend([one.number for one in taken])
        request.offsets.extend([one.sent for one in taken])
        request.counts.extend(counts)
        request.tokens = b"".join(self._response(one.sent, end) for one, end in zip(taken, ends, strict=True))
        for one, end in zip(taken, ends, strict=True):
            one.sent, one.stopped = end, one.releasing
        self._flights.append(Flight(since, sum(counts), taken, ends))
        self._out.put_nowait(request)

    def _response(self, first: int, end: int) -> bytes:
        """A rollout's tokens from place `first` to before `end`, packed."""
        return response(first, end)

    async def _read_append(self, call: Any) -> None:
        async for answer in call:
            if not answer.sequence:
                continue
            now, flight = time.monotonic(), self._flights.popleft()
            self._fleet.answered(flight.tokens, now - flight.since)
            self._lag += 0.1 * (now - flight.since - self._lag)
            refused = {other.index: other for other in answer.others if other.status != 1}
            for index, one in enumerate(flight.parts):
                if index in refused:
                    self._refused(one, refused[index])
                    continue
                one.stored = max(one.stored, flight.ends[index])
                if one.stored >= one.end:
                    self._forget(one.attempt.attempt_id)
                elif one.stopped and all(one not in later.parts for later in self._flights):
                    self._release(one)
        raise ConnectionError(f"{self.name}: append stream ended")

    def _refused(self, one: Rollout, ack: fleet_pb2.AppendAck) -> None:
        self._forget(one.attempt.attempt_id)
        self._fleet.failed(f"status {ack.status}")

    def _release(self, one: Rollout) -> None:
        if one.attempt.attempt_id in self.rollouts:
            self._forget(one.attempt.attempt_id)
            released = fleet_pb2.Released(attempts=[one.attempt], reason="moved", cause=types_pb2.END_CAUSE_MOVED)
            self._say.put_nowait(fleet_pb2.WorkerMessage(released=released))
