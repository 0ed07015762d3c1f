"""Attaches workers, takes in their reports, and detaches lost ones.

Invariant: a worker has at most one session; `state.sessions` holds those with an open control stream. A session that is
gone has no attempts. When this process dies, workers keep their attempts and attach again with them.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.dispatch.installs import may_change, refused
from ebbtide.coordinator.fleet.worker_health import SuspectWorker, WorkerHealth, WorkerTrust
from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.rules.placement import blames
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import adopt
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.coordinator.state.worker_messages import Drain
from ebbtide.coordinator.state.worker_reports import (
    AttachReport,
    DrainNotice,
    EngineChangedReport,
    HeartbeatReport,
    InstalledReport,
    InstallFailedReport,
    ReleasedReport,
)
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import NotFound, NotReady
from ebbtide.types.fleet import (
    PROTOCOL_VERSION,
    AttemptRef,
    EndCause,
    EndReason,
    EngineInfo,
    Worker,
    WorkerState,
    check_attempt,
)
from ebbtide.types.ids import check_id, new_fence, shortened
from ebbtide.types.run import RunEvent, WorkerChange

log = telemetry.get_logger(__name__)
#: A lost worker stays in the listing for so long, unless so many were lost since; its model's name is shortened.
_LOST_KEPT_S: Final = 60.0
_LOST_KEPT: Final = 256
_NAME_BYTES: Final = 256
#: How long a view waits while the coordinator is late.
_VIEW_WAITS_S: Final = 1.0
#: Pause after a failed install.
_INSTALL_PAUSE_S: Final = 2.0
#: What helps where no worker scores prompts.
SCORERS: Final = "start workers whose engine scores them: vLLM, of this release"


class WorkerRegistry:
    """Of the settings it uses `heartbeat_s`, `heartbeat_timeout_s` and `reattach_grace_s`. It needs an event loop only
    for workers that are lost while an append stream of theirs is open.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        state: CoordinatorState,
        trust: WorkerTrust,
        run_events: RunEvents,
        *,
        new_id: Callable[[], str] = new_fence,
    ) -> None:
        """`new_id`: makes the ids of sessions; equal workers are placed at in their order."""
        self._settings, self._state, self._run_events = settings, state, run_events
        self.trust, self._new_id = trust, new_id
        self._health = WorkerHealth(settings.heartbeat_timeout_s, settings.heartbeat_s)
        self.judge_every_s = self._health.judge_every_s
        self._closing = ClosingSessions()
        self._lost: dict[str, tuple[float, Worker]] = {}
        self._scorer_left = -math.inf  # when a worker that scores prompts left last
        self._leaving = False

    def attach(self, hello: AttachReport) -> tuple[WorkerSession, list[AttemptRef], list[AttemptRef]]:
        """Open a session. Returns it, the held attempts that continue, and those that are over."""
        check_id(hello.worker_id, field="attach.worker_id")
        for index, held in enumerate(hello.held):
            check_attempt(held.attempt, field=f"attach.held[{index}].attempt")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise NotReady(
                f"the worker speaks protocol {hello.protocol_version}, this coordinator {PROTOCOL_VERSION}; "
                "run the same version of Ebbtide on both"
            )
        now = self._state.clock()
        session = self._state.new_session(self._new_id(), hello, now)
        adopted, superseded = adopt(self._state, session, (held.attempt for held in hello.held))
        if adopted:
            self._state.returning.came(now)
        for other in [one for one in self._state.sessions.values() if one.worker_id == hello.worker_id]:
            self.detach(other, "it attached again", went_on=not other.attempts)
        self._lost.pop(hello.worker_id, None)
        self.trust.attached(hello.worker_id, now)
        self._recognise(session, adopted)
        self._state.attach(session)
        if hello.run_id and hello.run_id not in self._state.runs:
            session.outbox.tell_run_ended(hello.run_id)
        self._health.heard(session, now)
        quarantined_s = self.trust.quarantined_s(session.worker_id, now)
        text = f"worker {hello.worker_id} attached"
        text += f"; it was lost too often, and gets no work for {quarantined_s:.0f} s" if quarantined_s else ""
        self._run_events.of_worker(session, text, WorkerChange.QUARANTINED if quarantined_s else WorkerChange.ATTACHED)
        log.info("attached", worker_id=hello.worker_id, adopted=len(adopted), superseded=len(superseded))
        return session, adopted, superseded

    def _recognise(self, session: WorkerSession, adopted: list[AttemptRef]) -> None:
        """Take the version of a worker that continues attempts as installed; others are told to install one."""
        run = self._state.runs[adopted[0].run_id] if adopted else None
        for version in reversed(tuple(run.versions.available.values())) if run else ():
            if run and version in session.hello.installed:
                session.keep_serving(run.run_id, version)
                return

    def detach(
        self, session: WorkerSession, reason: str, suspect: SuspectWorker | None = None, *, went_on: bool = False
    ) -> None:
        """End the session; its attempts are re-queued after the grace. A repeat does nothing. `went_on`: the worker
        already has another session, with all that it had in this one.
        """
        if session.gone:
            return
        now = self._state.clock()
        self._state.detach(session)
        quiet_s = suspect.quiet_s if suspect else self._health.quiet_s(session, now)
        self._health.gone(session)
        if self._leaving:
            return
        self._scorer_left = now if session.scores_prompts else self._scorer_left
        if session.draining:
            self.trust.left(session.worker_id)
        elif not went_on:
            self.trust.lost(session.worker_id, now)
        state = WorkerState.SUSPECTED if suspect else WorkerState.LOST
        lost = self._orphan_all(session, reason, now, quiet_s, suspected=suspect is not None)
        self._keep_lost(msgspec.structs.replace(self._listed(session, state, now), running=lost, reason=reason), now)
        left = session.draining and not lost
        change = WorkerChange.LEFT if left else WorkerChange[state.name]
        log.warning(change.value, worker_id=session.worker_id, reason=reason, rollouts=lost)
        text = f"worker {session.worker_id} {change}" + ("" if left else f": {reason}; {lost} rollouts go elsewhere")
        self._run_events.of_worker(session, text, change, rollouts=lost)

    def _keep_lost(self, worker: Worker, now: float) -> None:
        """List it as lost for a while, within bounds: the listing must fit into one message."""
        if (engine := worker.engine) is not None:
            engine = msgspec.structs.replace(engine, model=shortened(engine.model, _NAME_BYTES), eos_token_ids=())
        self._lost.pop(worker.worker_id, None)  # the newest stand last
        self._lost[worker.worker_id] = (now, msgspec.structs.replace(worker, engine=engine, installed=()))
        if len(self._lost) > _LOST_KEPT:
            del self._lost[next(iter(self._lost))]

    def _orphan_all(self, session: WorkerSession, reason: str, now: float, quiet_s: float, *, suspected: bool) -> int:
        """Orphan the attempts of a session that is over; returns how many. Tokens that a lost worker may have sent get
        a moment to be stored; a suspected worker gets none, and does not get the same rollouts again.
        """
        lost = list(session.attempts.values())
        drains = not suspected and not session.append_stream.drained.is_set()
        grace = 0.0 if suspected else self._settings.reattach_grace_s
        due = now + max(grace, DRAIN_S if drains else 0.0)
        cause = EndCause.WORKER_SUSPECTED if suspected else EndCause.WORKER_LOST
        blame = blames(cause) and not session.reclaimed  # on a reclaimed host no rollout can make a token
        orphaned = OrphanedAttempt(due, EndReason(cause, f"worker lost: {reason}", blame, noticed_s=quiet_s))
        for attempt, tokens in zip(lost, [_lost_at_most(one, session, now) for one in lost], strict=True):
            attempt.orphan(orphaned, lost=tokens)
        if lost and drains:
            self._closing.add(session, lost, orphaned, now + grace)
        return len(lost)

    def judge(self, now: float) -> Iterator[None]:
        """Detach the workers that have been silent, or have made nothing, for too long. It yields after each, so that
        others have their turn in between; run it to its end. While workers come back after a takeover none is judged:
        a large fleet is late for everything then. The judgement's own pause does not count as their silence.
        """
        late_s, returning = self._state.overload.late_s(now), self._state.returning.more_s(now) > 0.0
        for suspect in () if returning else self._health.judge(self._state.sessions.values(), now, late_s):
            if session := self._state.sessions.get(suspect.session_id):
                self.detach(session, suspect.reason, suspect)
                yield
        for worker_id, (when, _) in list(self._lost.items()):
            if now - when > _LOST_KEPT_S:
                del self._lost[worker_id]

    def hear(self, session: WorkerSession, message: msgspec.Struct) -> None:
        """Take in one control message."""
        now = self._state.clock()
        self._health.heard(session, now)
        match message:
            case HeartbeatReport():
                if (delay_s := self._health.delay_s(session, message.uptime_s, now)) is not None:
                    self._state.overload.delayed(delay_s)
                if session.hear(message, now):
                    self._turned(session)
            case InstalledReport():
                self._installed(session, message)
            case InstallFailedReport():
                self._install_failed(session, message)
            case EngineChangedReport():
                self._engine_changed(session, message)
            case ReleasedReport():
                self._released(session, message)
            case DrainNotice():
                session.drain(message.reason)
                text = f"worker {session.worker_id} drains" + (f": {message.reason}" if message.reason else "")
                self._run_events.of_worker(session, text, WorkerChange.DRAINING, deadline=message.deadline_s)

    def _turned(self, session: WorkerSession) -> None:
        """Count a reclaim of a borrowed worker's host."""
        if session.reclaimed:
            metrics.reclaims.inc()
        log.debug("reclaimed" if session.reclaimed else "granted", worker_id=session.worker_id)

    def drain(self, worker_id: str, within_s: float) -> int:
        """Ask a worker to hand over and leave within so many seconds; it gets no more work. Returns the number of its
        rollouts. A repeat sends the deadline again. Raises `NotFound`.
        """
        session = next((one for one in self._state.sessions.values() if one.worker_id == worker_id), None)
        if session is None:
            raise NotFound(f"no worker {worker_id} is attached; `ebbtide worker list` lists those that are")
        session.drain("asked to leave")
        session.outbox.send(Drain(within_s))
        log.info("drain", worker_id=worker_id, within_s=within_s, rollouts=len(session.attempts))
        return len(session.attempts)

    def _installed(self, session: WorkerSession, message: InstalledReport) -> None:
        if (run := self._state.runs.get(message.run_id)) is None:
            session.outbox.tell_run_ended(message.run_id)  # it may have pulled while it was not attached
            return
        changed = session.note_installed(message.run_id, message.version)
        if changed is not None and not changed.restarted:
            self._state.note_changeover(session.worker_id, self._state.clock() - changed.at)
        run.versions.note_installed(message.version.version, session.hello.engine.architecture)
        if not message.pull_s and not message.pause_s:
            return  # it had the version already
        self._run_events.installed(run, session, message)
        metrics.install_seconds.labels("pull").observe(message.pull_s)
        metrics.install_seconds.labels("pause").observe(message.pause_s)
        log.info(
            "installed",
            worker_id=session.worker_id,
            run_id=message.run_id,
            version=message.version.version,
            pull_s=message.pull_s,
            pause_s=message.pause_s,
        )

    def _engine_changed(self, session: WorkerSession, message: EngineChangedReport) -> None:
        """Note that the worker's engine restarted: for another architecture or, if that failed, for its own model."""
        session.note_restarted(message.engine)
        metrics.engine_starts.inc()
        text = f"the engine of worker {session.worker_id} was restarted, for {message.engine.model}"
        self._run_events.of_worker(session, text, WorkerChange.CHANGED, seconds=message.seconds)
        log.info("engine changed", worker_id=session.worker_id, run_id=message.run_id, seconds=message.seconds)

    def _install_failed(self, session: WorkerSession, message: InstallFailedReport) -> None:
        changing = session.note_install_failed()
        asked = changing is not None and changing.restarted and changing.run_id == message.run_id
        version = message.version.version
        log.warning("install failed", worker_id=session.worker_id, run_id=message.run_id, reason=message.message)
        if (run := self._state.runs.get(message.run_id)) is None:
            session.outbox.tell_run_ended(message.run_id)
            return
        now = self._state.clock()
        if message.architecture:
            run.versions.note_architecture(message.architecture)
            if asked:
                refused(session, message.architecture, now)
            elif may_change(run, session, now):  # the allocator asks it to, when that pays
                return
        session.bar(message.run_id, now + _INSTALL_PAUSE_S)
        text = f"worker {session.worker_id} could not install version {version}: {message.message}"
        key = f"install.{session.worker_id}.{version}"
        self._run_events.write(
            run, RunEvent(kind="warning", key=key, message=text, labels={"worker": session.worker_id})
        )
        if message.architecture:
            run.versions.note_misfit()
        if not message.unreachable:  # else it is available again once the relay is back
            run.versions.note_failed_install(version)

    def _released(self, session: WorkerSession, message: ReleasedReport) -> None:
        cause = EndCause(message.cause)
        if cause is EndCause.WRONG_VERSION:  # it has another version than the mirror says: tell it again
            session.distrust_version()
        why = EndReason(cause, message.reason or "handed back", blames(cause))
        orphaned = OrphanedAttempt(self._state.clock(), why)
        for ref in message.attempts:
            attempt = session.attempts.get(ref.attempt_id)
            if attempt is None or attempt.ref != ref:
                continue
            if cause is EndCause.MOVED and attempt.target:  # a move that was given up has no target
                attempt.orphan(OrphanedAttempt(orphaned.due, EndReason(cause, f"moved to {attempt.target}")))
            else:
                attempt.orphan(orphaned)

    def session(self, session_id: str) -> WorkerSession:
        """The session that a message names. Raises `NotFound` if it is over or another coordinator's."""
        if (session := self._state.sessions.get(session_id)) is not None:
            self._health.heard(session, self._state.clock())
            return session
        if (session := self._closing.get(session_id)) is not None:
            return session
        raise NotFound("this session is over; attach again on the control stream")

    async def give_way(self) -> None:
        """Wait a little if a view, or a large submit, gives way to more urgent work now."""
        if self._state.sheds(Work.VIEWS):
            await asyncio.sleep(_VIEW_WAITS_S)

    def workers(self) -> list[Worker]:
        """All attached workers, and those lost lately."""
        now = self._state.clock()
        listed = [self._listed(session, session.state, now) for session in self._state.sessions.values()]
        return sorted([*listed, *(worker for _, worker in self._lost.values())], key=lambda one: one.worker_id)

    def engines(self) -> list[EngineInfo]:
        """Engines of attached workers, and of workers lost lately, which may come again."""
        lost = [worker.engine for _, worker in self._lost.values() if worker.engine]
        return [session.hello.engine for session in self._state.sessions.values()] + lost

    def cannot_score(self) -> bool:
        """Whether workers are attached that stay, and none of them scores prompts, nor any that left lately, which may
        come again.
        """
        staying = [session for session in self._state.sessions.values() if not session.draining]
        if not staying or any(session.scores_prompts for session in staying):
            return False
        return self._state.clock() - self._scorer_left > _LOST_KEPT_S

    def cannot_sample_min_p(self) -> bool:
        """Whether workers are attached that stay, and none of them samples with `min_p`."""
        staying = [session for session in self._state.sessions.values() if not session.draining]
        return bool(staying) and not any(session.samples_min_p for session in staying)

    def _listed(self, session: WorkerSession, state: WorkerState, now: float) -> Worker:
        beat, quarantined_s = session.beat, self.trust.quarantined_s(session.worker_id, now)
        if quarantined_s and state not in {WorkerState.DRAINING, WorkerState.LOST, WorkerState.SUSPECTED}:
            state = WorkerState.QUARANTINED
        return Worker(
            worker_id=session.worker_id,
            kind=session.hello.kind,
            state=state,
            slots=session.hello.slots,
            site=session.hello.site,
            running=len(session.attempts),
            tokens_per_s=beat.tokens_per_s,
            installed=(session.installed[1],) if session.installed else session.hello.installed,
            last_heartbeat_s=self._health.quiet_s(session, now),
            tokens_generated=beat.tokens_generated,
            busy_s=beat.busy_s,
            uptime_s=beat.uptime_s,
            engine=session.hello.engine,
            waiting=len(session.pending),
            plateau=session.plateau,
            rollout_tokens_per_s=session.rollout_tokens_per_s,
            offered_slots=session.slots,
            unadmitted=beat.unadmitted,
            parked=beat.parked,
            preemptions=beat.preemptions,
            prefill_tokens_per_s=session.prefill,
            quarantined_s=quarantined_s,
            reason="it was lost too often" if state is WorkerState.QUARANTINED else session.reason or session.given_up,
            borrowed=beat.borrowed if session.borrowed else None,
            given_up=bool(session.given_up),
            drafting=beat.drafting,
        )

    def leave(self) -> None:
        """Prepare for this coordinator's end: streams that break from now on cost workers no attempts."""
        self._leaving = True

    async def close(self) -> None:
        """Wait no longer for the last tokens of lost workers."""
        await self._closing.close()


def _lost_at_most(attempt: RunningAttempt, session: WorkerSession, now: float) -> int:
    """Tokens that may be lost with a worker: its flush window, or what it can have made since its last message at twice
    its usual rate, whichever is less.
    """
    most = attempt.max_tokens - attempt.stored
    if session.flush_tokens:
        most = min(most, session.flush_tokens)
    started = len(session.attempts) - len(session.pending)
    if started and (rate := session.beat.tokens_per_s / started):
        most = min(most, math.ceil(2 * rate * (now - session.append_stream.progressed)))
    return max(0, most)


#: How long a lost worker's last tokens may take to be stored before its attempts end.
DRAIN_S: Final = 0.1


class ClosingSessions:
    """Waits for the last tokens of lost workers before their attempts end.

    Invariant: a session is here from its loss until its append stream has ended, `DRAIN_S` at most; its append stream
    is served meanwhile. Lost with the process: the workers send again.
    """

    def __init__(self) -> None:
        self._closing: dict[str, WorkerSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, session_id: str) -> WorkerSession | None:
        """A session that is over, with tokens still to be stored."""
        return self._closing.get(session_id)

    def add(
        self, session: WorkerSession, lost: Sequence[RunningAttempt], orphaned: OrphanedAttempt, due: float
    ) -> None:
        """Let the `lost` attempts be `due` once the append stream of their worker has ended."""
        self._closing[session.session_id] = session
        task = asyncio.create_task(self._drain(session, lost, orphaned, due), name=f"drain {session.worker_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(
        self, session: WorkerSession, lost: Sequence[RunningAttempt], orphaned: OrphanedAttempt, due: float
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await session.append_stream.drained.wait()
        self._closing.pop(session.session_id, None)
        for attempt in lost:
            if attempt.orphaned is orphaned:
                attempt.set_due(due)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
