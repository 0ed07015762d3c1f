"""Carries out the coordinator's messages, and reports this worker's state.

Invariant: while `draining`, no attempt is admitted; of several deadlines to leave, the earliest counts. Messages for
the coordinator wait in `outgoing` for the current control stream. Messages that a broken stream did not take are
dropped: the next attach reports everything again. No message waits for an earlier one: assignments that come during an
install wait in `_arriving`, and other messages are handled meanwhile.
"""

import asyncio
import math
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.generation.generation import Assignment, HeldForecast
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts, ReleaseReason
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.rollout_worker.guard_link import GuardLink
from ebbtide.rollout_worker.installs.installer import Installer
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EndCause, FlushPace, WorkerState
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire import to_proto

log = telemetry.get_logger(__name__)

#: Time reserved for goodbyes and the end of the process when leaving, but no more than a tenth of all.
_MARGIN_S: Final = 2.0
#: Time for a busy engine to pause, but no more than a quarter of the time left.
_PAUSE_S: Final = 2.0
#: A hold for the store is reported after this time: on a busy machine there are many short ones.
_SLOW_S: Final = 0.25
#: The token rate is measured over at least this time, however often heartbeats go.
_RATE_S: Final = 0.2


class ControlOutbox:
    """Messages for the control stream, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[fleet_pb2.WorkerMessage | None] = asyncio.Queue()

    def put(self, message: fleet_pb2.WorkerMessage) -> None:
        self.queue.put_nowait(message)

    def release(self, refs: Iterable[AttemptRef], why: ReleaseReason) -> None:
        attempts = [to_proto(ref, fleet_pb2.AttemptRef) for ref in refs]
        cause = types_pb2.EndCause.ValueType(why.cause)
        released = fleet_pb2.Released(attempts=attempts, reason=why.text, cause=cause)
        self.put(fleet_pb2.WorkerMessage(released=released))

    def end(self) -> None:
        """Close the stream from this side, after the queued messages."""
        self.queue.put_nowait(None)

    def clear(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()


class ControlHandler:
    """The use cases of one worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        outbox: Outbox,
        attempts: LocalAttempts,
        installer: Installer,
        outgoing: ControlOutbox,
        borrowing: GuardLink | None,
    ) -> None:
        """`borrowing`: the guard of a borrowed worker's host."""
        self.settings, self.worker_id = settings, worker_id
        self.outbox, self.attempts, self.installer, self.outgoing = outbox, attempts, installer, outgoing
        self._borrowing = borrowing
        self.leaving = asyncio.Event()  # set when the worker must hand over
        self.reason = ""  # why it leaves
        self.drained = False
        self.beat = asyncio.Event()  # set when a heartbeat is due at once
        attempts.holds.watch(self._hold_changed)
        self._arriving: dict[str, Assignment] = {}
        self._deadline = math.inf
        self._limit: asyncio.Timeout | None = None
        self._started = self._measured_at = time.monotonic()
        self._measured_tokens, self._rate = 0, 0.0
        self._preemptions = 0  # that were counted

    @property
    def draining(self) -> bool:
        return self.leaving.is_set()

    @property
    def remaining_s(self) -> float:
        """Time left to hand over."""
        return max(0.0, self._deadline - time.monotonic())

    def attach(self) -> fleet_pb2.WorkerMessage:
        """The first message of a session; clears `outgoing`."""
        self.outgoing.clear()
        self._arriving.clear()  # not reported as held, so the coordinator assigns them again
        if self.draining:
            self._say_draining()
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
                capabilities=self._capabilities(),
                slots=self.settings.slots,
                engine=to_proto(self.attempts.info, fleet_pb2.EngineInfo),
                held=held,
                installed=[to_proto(current.version, types_pb2.PolicyVersion)] if current else [],
                flush_tokens=self.settings.flush_tokens,
                flush_interval_s=self.settings.flush_interval_ms / 1000,
                run_id=current.run_id if current else "",
            )
        )

    def _capabilities(self) -> list[str]:
        known = ["resume", "flush_interval", "forecasts", f"engine:{self.settings.engine}"]
        known += [] if self.attempts.engine.speculates else ["min_p"]  # vLLM samples drafted tokens without it
        return [*known, "score"] if self.attempts.engine.scores_prompts else known

    def heartbeat(self) -> fleet_pb2.WorkerMessage:
        """The worker's state; `tokens_per_s` is a mean since the last measurement. Checks the engine, too."""
        self.attempts.check()
        now, tokens = time.monotonic(), self.attempts.tokens
        if (elapsed := now - self._measured_at) >= _RATE_S:
            self._rate = (tokens - self._measured_tokens) / elapsed
            self._measured_at, self._measured_tokens = now, tokens
        gate, preemptions = self.attempts.gate, self.attempts.engine.preemptions
        metrics.RUNNING.set(self.attempts.running - gate.waiting)
        metrics.WAITING.set(self.attempts.waiting + len(self._arriving))
        metrics.UNADMITTED.set(gate.waiting)
        metrics.RESERVED.set(gate.reserved)
        metrics.PREEMPTIONS.inc(preemptions - self._preemptions)
        self._preemptions = preemptions
        metrics.UNACKNOWLEDGED.set(self.outbox.unacknowledged)
        beat = fleet_pb2.Heartbeat(
            state=types_pb2.WorkerState.ValueType(self._state()),
            tokens_per_s=self._rate,
            tokens_generated=tokens,
            busy_s=self.attempts.busy_s,
            uptime_s=now - self._started,
            held=bool(self.attempts.holds),
            quiet_s=self.attempts.quiet_s,
            install_s=self.installer.install_s,
            restart_s=self.installer.restart_s,
            prompt_reads=self.attempts.reading.reads,
            prompt_tokens=self.attempts.reading.tokens,
            prompt_s=self.attempts.reading.seconds,
            unadmitted=gate.waiting,
            parked=gate.parked,
            preemptions=preemptions,
            drafting=to_proto(drafting, fleet_pb2.Drafting) if (drafting := self.attempts.engine.drafting) else None,
            borrowed=to_proto(self._borrowing.state, fleet_pb2.Borrowed) if self._borrowing else None,
        )
        return fleet_pb2.WorkerMessage(heartbeat=beat)

    def assign(self, assignments: Iterable[Assignment]) -> None:
        """Start the assignments that this worker can take, and hand the others back with the reason; after an install,
        if one is going on."""
        for assignment in assignments:
            if assignment.attempt.attempt_id not in self.attempts:
                self._arriving[assignment.attempt.attempt_id] = assignment
        self._admit()

    def cancel(self, refs: Iterable[AttemptRef]) -> None:
        """Forget these attempts: they are over, or another worker's."""
        refs = list(refs)
        for ref in refs:
            self._arriving.pop(ref.attempt_id, None)
        self.attempts.drop(refs, "cancelled")

    def forget(self, run_id: str) -> None:
        """A run is over: drop its attempts, and free what it uses."""
        for attempt_id in [one for one, held in self._arriving.items() if held.attempt.run_id == run_id]:
            del self._arriving[attempt_id]
        self.attempts.drop([ref for ref, _ in self.outbox.held() if ref.run_id == run_id], "cancelled")
        self.installer.forget(run_id)
        log.info("run over", run_id=run_id)

    def release(self, refs: Iterable[AttemptRef], why: ReleaseReason) -> None:
        """Hand these attempts back with all their tokens; see `LocalAttempts.release`."""
        refs = list(refs)
        if early := [ref for ref in refs if self._arriving.pop(ref.attempt_id, None)]:
            self.outgoing.release(early, why)
        self.attempts.release(refs, why)

    def foresee(self, forecasts: Iterable[HeldForecast]) -> None:
        """Admit rollouts to the engine's memory by what is expected of them now, also those that wait for an install:
        the coordinator tells it once.
        """
        for one in forecasts:
            rest = one.expected_tokens
            self.attempts.gate.forecast(one.attempt_id, rest, stored=one.stored)
            if (waits := self._arriving.get(one.attempt_id)) is not None:
                self._arriving[one.attempt_id] = msgspec.structs.replace(waits, expected_tokens=rest)

    def pace_flushes(self, pace: FlushPace) -> None:
        """Flush no more often than that."""
        self.outbox.pace(pace, time.monotonic())
        self.attempts.due.set()
        self.attempts.pressure.set()

    def borrow(self, *, wanted: bool, reason: str) -> None:
        """Apply the coordinator's decision whether to borrow this host."""
        if self._borrowing is not None:
            self._borrowing.want(wanted=wanted, reason=reason)

    def leave(self, within_s: float, reason: str) -> None:
        """Begin to hand over, to be gone in `within_s` seconds. A later deadline than the current one is ignored."""
        deadline = time.monotonic() + within_s - min(_MARGIN_S, within_s / 10)
        if deadline >= self._deadline:
            return
        self._deadline = deadline
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self.remaining_s)
        log.info("leaving", reason=reason, within_s=round(within_s, 3), first=not self.draining)
        if not self.draining:
            self.reason = reason
            self.leaving.set()
            self.installer.stop()
            self._admit()  # hands them back
        self._say_draining()
        self.beat.set()

    def _hold_changed(self) -> None:
        self.beat.set()
        self._admit()

    def _admit(self) -> None:
        while self._arriving and (self.draining or not self.installer.installing):
            self._assign(self._arriving.pop(next(iter(self._arriving))))

    def _assign(self, assignment: Assignment) -> None:
        current = self.installer.current
        if self.draining:
            why = ReleaseReason(EndCause.WORKER_LEAVES, "draining")
        elif current is None or (current.run_id, current.version.policy) != (
            assignment.attempt.run_id,
            assignment.policy,
        ):
            why = ReleaseReason(EndCause.WRONG_VERSION, "version: none of this policy is installed")
        elif not assignment.admits(current.version.version):
            why = ReleaseReason(EndCause.WRONG_VERSION, f"version: {current.version.version} is installed")
        else:
            try:
                self.attempts.start(assignment)
            except InvalidRequest as error:
                why = ReleaseReason(EndCause.FAILED, str(error))
            else:
                return
        ref = assignment.attempt
        log.info("not taken", run_id=ref.run_id, rollout_id=ref.rollout_id, reason=why.text)
        self.outgoing.release([ref], why)

    async def drain(self) -> bool:
        """Hand over all attempts and close the streams. Returns whether all tokens were stored in time."""
        try:
            async with asyncio.timeout(self.remaining_s) as self._limit:
                why = ReleaseReason(EndCause.WORKER_LEAVES, "drained")
                await self.attempts.hand_over(why, patience_s=min(_PAUSE_S, self.remaining_s / 4))
                await self.attempts.empty.wait()
        except TimeoutError:
            log.warning("tokens not handed over in time", tokens=self.outbox.unacknowledged, attempts=len(self.outbox))
            return False
        finally:
            self._limit = None
        self.drained = True
        self.outgoing.end()
        return True

    def _state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        return WorkerState.INSTALLING if self.installer.busy else WorkerState.READY

    def _say_draining(self) -> None:
        notice = fleet_pb2.Draining(deadline_s=self.remaining_s, reason=self.reason)
        self.outgoing.put(fleet_pb2.WorkerMessage(draining=notice))


async def throttle(engine: Engine, outbox: Outbox, attempts: LocalAttempts) -> None:
    """Hold the engine while the outbox is behind, forever: no more than its window may be lost with this process."""
    pressure = attempts.pressure
    while True:
        await pressure.wait()
        pressure.clear()
        if not outbox.behind:
            continue
        start = time.monotonic()
        saying = asyncio.get_running_loop().call_later(_SLOW_S, _say_held, attempts)
        try:
            await engine.pause("store")
            while outbox.behind:
                await pressure.wait()
                pressure.clear()
            await engine.resume("store")
        finally:
            saying.cancel()
            if "store" in attempts.holds:
                attempts.holds.end("store")
        metrics.THROTTLED_SECONDS.inc(time.monotonic() - start)


def _say_held(attempts: LocalAttempts) -> None:
    log.warning("the store is slow: generation is held")
    attempts.holds.begin("store")
