"""A scripted worker that outlives its coordinator: it attaches again with all that it holds, as real workers do."""

import asyncio
import time
from collections import deque
from typing import Final, Protocol

from benchmarks.control_plane.worker import Rollout, Watcher, Worker
from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import EbbtideError
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.leader_channel import LeaderChannel
from ebbtide.v1 import fleet_pb2

#: Tokens/s of each rollout that heartbeats tell of.
_ENGINE_RATE: Final = 30.0


def _cancelled() -> bool:
    """Whether this task is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ScaleWatcher(Watcher, Protocol):
    """The fleet, as these workers see it. `worker_rate`: tokens/s of each worker."""

    @property
    def worker_rate(self) -> float: ...
    def attached(self, name: str) -> None: ...
    def refilled(self, seconds: float) -> None: ...
    def lost_tokens(self, count: int) -> None: ...


class MeteredWorker(Worker):
    """Its heartbeats tell of an engine that is as fast for each rollout, however many it has: its speed can be learnt,
    and all slots are worth filling. The tokens that it sends are fewer: so many as two cores bear.
    """

    _up_s = _busy_s = _tokens = _metered = 0.0

    def _heartbeat(self) -> fleet_pb2.Heartbeat:
        beat, now = super()._heartbeat(), time.monotonic()
        if self._metered:
            self._up_s += (past_s := now - self._metered)
            self._busy_s += past_s if self.rollouts else 0.0
            self._tokens += past_s * _ENGINE_RATE * len(self.rollouts)
        self._metered = now
        beat.uptime_s, beat.busy_s, beat.tokens_generated = self._up_s, self._busy_s, int(self._tokens)
        beat.quiet_s = 1 / _ENGINE_RATE if self.rollouts else 0.0
        return beat


class LastingWorker(MeteredWorker):
    """`address`: of coordinators several, with commas between them. It ends when it is told to `vanish`."""

    def __init__(self, fleet: ScaleWatcher, name: str, address: str, token: str, slots: int) -> None:
        super().__init__(fleet, name, address.partition(",")[0], token, slots)
        self._watcher = fleet
        self._heads = LeaderChannel(address, ClientSecurity(token=token))
        self._free: deque[float] = deque()  # when a slot became free
        self._version: fleet_pb2.Installed | None = None

    async def run(self) -> None:
        first, self._channel = self._channel, self._heads  # type: ignore[assignment]
        await first.close()
        waits = pauses(0.1, 2.0)
        try:
            while not self.silent:
                began = time.monotonic()
                try:
                    with self._heads.translated():
                        await self._session()
                except asyncio.CancelledError:
                    if not self.silent and _cancelled():
                        raise  # else only its call was, because another coordinator leads
                except (EbbtideError, ConnectionError, StopAsyncIteration):
                    if time.monotonic() - began > 10.0:
                        waits = pauses(0.1, 2.0)
                self._rewind()
                if not self.silent:
                    await self._heads.pause(next(waits))
        finally:
            self._fleet.running -= len(self.rollouts)
            self.rollouts.clear()
            await self._heads.close()

    def _rewind(self) -> None:
        """A new stream begins after the last acknowledged token."""
        self._flights.clear()
        self._urgent.clear()
        self._numbers = 0
        self._out, self._say = asyncio.Queue(), asyncio.Queue()
        now = time.monotonic()
        self._free = deque([now] * len(self._free))
        for one in self.rollouts.values():
            one.sent, one.number, one.ending, one.stopped = one.stored, 0, False, False
            one.at = now

    def _attach(self) -> fleet_pb2.WorkerMessage:
        message = super()._attach()
        for one in self.rollouts.values():
            message.attach.held.add(attempt=one.attempt, offset=int(one.made))
        if self._version is not None:
            message.attach.installed.append(self._version.version)
            message.attach.run_id = self._version.run_id
        return message

    def _pace(self) -> float:
        """All workers are as fast, however few rollouts they have: else those with a few would seem to stall."""
        return self._watcher.worker_rate / max(1, len(self.rollouts))

    def _attached(self, attached: fleet_pb2.Attached) -> None:
        super()._attached(attached)
        for ref in attached.superseded:
            self._forget(ref.attempt_id)
        self._watcher.attached(self.name)

    def _installed(self, done: fleet_pb2.Installed) -> None:
        self._version = done
        super()._installed(done)

    def _begin(self, assignment: fleet_pb2.Assignment, now: float) -> None:
        if self._free:
            self._watcher.refilled(now - self._free.popleft())
        super()._begin(assignment, now)

    def _forget(self, attempt_id: str) -> None:
        if attempt_id in self.rollouts:
            self._free.append(time.monotonic())
        super()._forget(attempt_id)

    def _refused(self, one: Rollout, ack: fleet_pb2.AppendAck) -> None:
        if ack.status != fleet_pb2.AppendAck.STATUS_GAP:
            self._forget(one.attempt.attempt_id)  # superseded: it goes on elsewhere
            return
        if ack.stored < one.stored:
            self._watcher.lost_tokens(one.stored - ack.stored)
        one.stored = one.sent = ack.stored
        one.made = max(one.made, float(ack.stored))
