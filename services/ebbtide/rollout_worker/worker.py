"""The worker as the coordinator meets it: what it says of itself, and what it does when told.

Invariant: while `draining`, no attempt is admitted. Messages for the coordinator wait in `outgoing` for the
control stream of the moment; what a broken stream did not take is dropped, for the next attach says everything
anew.
"""

import asyncio
import time
from collections.abc import Iterable

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.attempts import Attempts
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.generation import Assignment
from ebbtide.rollout_worker.installer import Installer
from ebbtide.rollout_worker.outbox import Outbox
from ebbtide.rollout_worker.settings import Settings
from ebbtide.rpc.convert import to_proto
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EngineInfo, WorkerState
from ebbtide.v1 import fleet_pb2, types_pb2

log = telemetry.get_logger(__name__)


class Outgoing:
    """Messages for the control stream, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[fleet_pb2.WorkerMessage | None] = asyncio.Queue()

    def put(self, message: fleet_pb2.WorkerMessage) -> None:
        self.queue.put_nowait(message)

    def release(self, refs: Iterable[AttemptRef], reason: str) -> None:
        attempts = [to_proto(ref, fleet_pb2.AttemptRef) for ref in refs]
        self.put(fleet_pb2.WorkerMessage(released=fleet_pb2.Released(attempts=attempts, reason=reason)))

    def end(self) -> None:
        """After what is queued, the stream is to be closed from this side."""
        self.queue.put_nowait(None)

    def clear(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()


class Worker:
    """Use-cases of one worker."""

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        info: EngineInfo,
        outbox: Outbox,
        attempts: Attempts,
        installer: Installer,
        outgoing: Outgoing,
    ) -> None:
        self.settings, self.worker_id, self.info = settings, worker_id, info
        self.outbox, self.attempts, self.installer, self.outgoing = outbox, attempts, installer, outgoing
        self.draining = self.drained = False
        self._started = self._measured_at = time.monotonic()
        self._measured_tokens = 0

    def attach(self) -> fleet_pb2.WorkerMessage:
        """The first message of a session; begins `outgoing` anew."""
        self.outgoing.clear()
        if self.draining:
            self.outgoing.put(_draining(self.settings.drain_timeout_s))
        if self.drained:
            self.outgoing.end()
        held = [
            fleet_pb2.HeldAttempt(attempt=to_proto(ref, fleet_pb2.AttemptRef), offset=offset)
            for ref, offset in self.outbox.held()
        ]
        current = self.installer.current
        return fleet_pb2.WorkerMessage(
            attach=fleet_pb2.Attach(
                worker_id=self.worker_id,
                kind=types_pb2.WorkerKind.ValueType(self.settings.kind),
                site=self.settings.site,
                protocol_version=PROTOCOL_VERSION,
                capabilities=["resume", f"engine:{self.settings.engine}"],
                slots=self.settings.slots,
                engine=to_proto(self.info, fleet_pb2.EngineInfo),
                held=held,
                installed=[to_proto(current.version, types_pb2.PolicyVersion)] if current else [],
            )
        )

    def heartbeat(self) -> fleet_pb2.WorkerMessage:
        """The worker's state; `tokens_per_s` is the mean since the last heartbeat."""
        now = time.monotonic()
        tokens = self.attempts.tokens
        rate = (tokens - self._measured_tokens) / max(now - self._measured_at, 1e-3)
        self._measured_at, self._measured_tokens = now, tokens
        metrics.RUNNING.set(self.attempts.running)
        metrics.WAITING.set(self.attempts.waiting)
        metrics.UNACKNOWLEDGED.set(self.outbox.unacknowledged)
        beat = fleet_pb2.Heartbeat(
            state=types_pb2.WorkerState.ValueType(self._state()),
            tokens_per_s=rate,
            tokens_generated=tokens,
            busy_s=self.attempts.busy_s,
            uptime_s=now - self._started,
        )
        return fleet_pb2.WorkerMessage(heartbeat=beat)

    async def assign(self, assignments: Iterable[Assignment]) -> None:
        """Start what can be started here; hand the rest straight back, with the reason."""
        async with self.installer.gate:
            for assignment in assignments:
                if assignment.attempt.attempt_id not in self.attempts:
                    self._assign(assignment)

    def _assign(self, assignment: Assignment) -> None:
        current = self.installer.current
        if self.draining:
            reason = "draining"
        elif current is None or (current.run_id, current.version.policy) != (
            assignment.attempt.run_id,
            assignment.policy,
        ):
            reason = "version: none of this policy is installed"
        elif not assignment.admits(current.version.version):
            reason = f"version: {current.version.version} is installed"
        else:
            try:
                self.attempts.start(assignment)
            except InvalidRequest as error:
                reason = str(error)
            else:
                return
        ref = assignment.attempt
        log.info("not taken", run_id=ref.run_id, rollout_id=ref.rollout_id, reason=reason)
        self.outgoing.release([ref], reason)

    async def drain(self, deadline_s: float) -> bool:
        """Stop admitting, hand over all attempts, and close the streams. Whether all tokens were stored in time."""
        self.draining = True
        self.outgoing.put(_draining(deadline_s))
        async with self.installer.gate:
            await self.attempts.hand_over("drained")
        try:
            async with asyncio.timeout(deadline_s):
                await self.attempts.empty.wait()
        except TimeoutError:
            log.warning("tokens not handed over in time", tokens=self.outbox.unacknowledged, attempts=len(self.outbox))
            return False
        self.drained = True
        self.outgoing.end()
        return True

    def _state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        return WorkerState.INSTALLING if self.installer.busy else WorkerState.READY


def _draining(deadline_s: float) -> fleet_pb2.WorkerMessage:
    return fleet_pb2.WorkerMessage(draining=fleet_pb2.Draining(deadline_s=deadline_s))


async def throttle(engine: Engine, outbox: Outbox, pressure: asyncio.Event) -> None:
    """Hold the engine from when the outbox is full until it is roomy again."""
    while True:
        await pressure.wait()
        pressure.clear()
        if not outbox.full:
            continue
        start = time.monotonic()
        log.warning("the store is slow: generation is held", unacknowledged=outbox.unacknowledged)
        await engine.pause("store")
        while not outbox.roomy:
            await pressure.wait()
            pressure.clear()
        await engine.resume("store")
        metrics.THROTTLED_SECONDS.inc(time.monotonic() - start)
