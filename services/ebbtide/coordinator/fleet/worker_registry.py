"""Workers: attaching, what they report, and losing them.

Invariant: a worker has at most one session; `state.sessions` holds those whose control stream is open. A session that
is gone has no attempts. When this process dies, workers keep their attempts and attach again with them.
"""

import asyncio
import math
import time
from contextlib import suppress
from typing import Final

import msgspec

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.fleet.engine_changes import may_change, refused
from ebbtide.coordinator.fleet.worker_health import SuspectWorker, WorkerHealth
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_transitions import AttemptTransitions
from ebbtide.coordinator.state.coordinator_state import (
    CoordinatorState,
    OrphanedAttempt,
    RunningAttempt,
    WorkerSession,
)
from ebbtide.coordinator.state.run_event_writer import RunEventWriter
from ebbtide.coordinator.state.worker_reports import (
    AttachReport,
    DrainNotice,
    EngineChangedReport,
    HeartbeatReport,
    InstalledReport,
    InstallFailedReport,
    ReleasedReport,
)
from ebbtide.errors import NotFound, NotReady
from ebbtide.scheduling.dispatch.attempt_endings import blames
from ebbtide.scheduling.health.flapping import Flapping
from ebbtide.store.rollout_rows import EndReason
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import PROTOCOL_VERSION, AttemptRef, EngineInfo, Worker, WorkerState, check_attempt
from ebbtide.types.ids import check_id, new_fence
from ebbtide.types.run import RunEvent
from ebbtide.types.text_bounds import shortened
from ebbtide.v1 import fleet_pb2

log = telemetry.get_logger(__name__)
#: A lost worker stays in the listing for so long, if so many were not lost since; so much of its model's name is kept.
_LOST_KEPT_S: Final = 60.0
_LOST_KEPT: Final = 256
_NAME_BYTES: Final = 256
#: How long what a lost worker had sent may take to be stored, before its attempts end.
_DRAIN_S: Final = 0.1
#: After a failed install, before the next try; and how many failures make an old version one that cannot be had.
_INSTALL_PAUSE_S: Final = 2.0
_INSTALL_FAILURES: Final = 3


class WorkerRegistry:
    def __init__(
        self, settings: CoordinatorSettings, state: CoordinatorState, attempts: AttemptTransitions, news: RunEventWriter
    ) -> None:
        self._settings, self._state, self._attempts, self._news = settings, state, attempts, news
        self._health = WorkerHealth(settings.heartbeat_timeout_s, settings.heartbeat_s)
        self._flapping = Flapping()
        self.judge_every_s = self._health.judge_every_s
        self._closing: dict[str, WorkerSession] = {}  # gone, but what they sent is still to be stored
        self._lost: dict[str, tuple[float, Worker]] = {}
        self._leaving = False

    def attach(self, hello: AttachReport) -> tuple[WorkerSession, list[AttemptRef], list[AttemptRef]]:
        """Open a session. Returns it, the held attempts that go on, and those that are over."""
        check_id(hello.worker_id, field="attach.worker_id")
        for index, held in enumerate(hello.held):
            check_attempt(held.attempt, field=f"attach.held[{index}].attempt")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise NotReady(
                f"the worker speaks protocol {hello.protocol_version}, this coordinator {PROTOCOL_VERSION}; "
                "run the same version of Ebbtide on both"
            )
        now = time.monotonic()
        session = WorkerSession(new_fence(), hello, now, self._state.resumes)
        adopted, superseded = self._attempts.adopt(session, (held.attempt for held in hello.held))
        for other in [one for one in self._state.sessions.values() if one.worker_id == hello.worker_id]:
            self.detach(other, "it attached again", went_on=not other.attempts)
        self._lost.pop(hello.worker_id, None)
        self._flapping.attached(hello.worker_id, now)
        self._recognise(session, adopted)
        self._state.sessions[session.session_id] = session
        if hello.run_id and hello.run_id not in self._state.runs:
            session.say_over(hello.run_id)
        self._health.heard(session, now)
        self._state.wake.set()
        shunned_s = self.shunned_s(session)
        text = f"worker {hello.worker_id} attached"
        text += f"; it was lost too often, and gets no work for {shunned_s:.0f} s" if shunned_s else ""
        self._news.of_worker(session, text, "shunned" if shunned_s else "attached")
        log.info("attached", worker_id=hello.worker_id, adopted=len(adopted), superseded=len(superseded))
        return session, adopted, superseded

    def _recognise(self, session: WorkerSession, adopted: list[AttemptRef]) -> None:
        """A worker that goes on with attempts has a version of their run. Any other is told to install anew: that costs
        one that has the version nothing."""
        run = self._state.runs[adopted[0].run_id] if adopted else None
        for version in reversed(run.versions.values()) if run else ():
            if run and version in session.hello.installed:
                session.installed, session.run_id = (run.run_id, version), run.run_id
                return

    def detach(
        self, session: WorkerSession, reason: str, suspect: SuspectWorker | None = None, *, went_on: bool = False
    ) -> None:
        """The session is over; its attempts wait for the grace and go back in line. Nothing happens the second time.
        `went_on`: the worker has another session already, and all that it had in this one.
        """
        if session.gone:
            return
        now = time.monotonic()
        session.gone = True
        session.outbox.put_nowait(None)
        self._state.sessions.pop(session.session_id, None)
        quiet_s = suspect.quiet_s if suspect else self._health.quiet_s(session, now)
        self._health.gone(session)
        if self._leaving:
            return
        if session.draining:
            self._flapping.left(session.worker_id)
        elif not went_on:
            self._flapping.lost(session.worker_id, now)
        state = WorkerState.SUSPECTED if suspect else WorkerState.LOST
        lost = self._orphan_all(session, reason, now, quiet_s, suspected=suspect is not None)
        self._keep_lost(msgspec.structs.replace(self._listed(session, state), running=lost, reason=reason), now)
        self._state.reap.set()
        self._state.wake.set()
        left = session.draining and not lost
        event = "left" if left else state.name.lower()
        log.warning(event, worker_id=session.worker_id, reason=reason, rollouts=lost)
        text = f"worker {session.worker_id} {event}" + ("" if left else f": {reason}; {lost} rollouts go elsewhere")
        self._news.of_worker(session, text, event, rollouts=lost)

    def _keep_lost(self, worker: Worker, now: float) -> None:
        """List it as lost for a while. However many come and go, the listing stays a message that arrives."""
        if (engine := worker.engine) is not None:
            engine = msgspec.structs.replace(engine, model=shortened(engine.model, _NAME_BYTES), eos_token_ids=())
        self._lost.pop(worker.worker_id, None)  # the newest stand last
        self._lost[worker.worker_id] = (now, msgspec.structs.replace(worker, engine=engine, installed=()))
        if len(self._lost) > _LOST_KEPT:
            del self._lost[next(iter(self._lost))]

    def _orphan_all(self, session: WorkerSession, reason: str, now: float, quiet_s: float, *, suspected: bool) -> int:
        """Orphan the attempts of a session that is over; returns how many. One that may still have sent tokens gets
        a moment for them to be stored; one that was silent anyway does not, nor may it have the same rollouts again.
        """
        lost = list(session.attempts.values())
        drains = not suspected and not session.drained.is_set()
        grace = 0.0 if suspected else self._settings.reattach_grace_s
        due = now + max(grace, _DRAIN_S if drains else 0.0)
        cause = EndCause.WORKER_SUSPECTED if suspected else EndCause.WORKER_LOST
        blame = blames(cause) and not session.standing  # while its host has itself back, no rollout can make a token
        orphaned = OrphanedAttempt(due, EndReason(cause, f"worker lost: {reason}", blame, noticed_s=quiet_s))
        for attempt, tokens in zip(lost, [_lost_at_most(one, session, now) for one in lost], strict=True):
            attempt.lost = tokens
            attempt.orphan(orphaned)
        if lost and drains:
            self._closing[session.session_id] = session
            self._news.background(self._drain(session, lost, orphaned, now + grace))
        return len(lost)

    async def _drain(
        self, session: WorkerSession, lost: list[RunningAttempt], orphaned: OrphanedAttempt, due: float
    ) -> None:
        """Let the append stream of a lost worker come to its end before its attempts do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await session.drained.wait()
        self._closing.pop(session.session_id, None)
        at_last = msgspec.structs.replace(orphaned, due=due)
        for attempt in lost:
            if attempt.orphaned is orphaned:
                attempt.orphaned = at_last
        self._state.reap.set()

    def judge(self, now: float) -> None:
        """Lose the workers that have been silent, or have made nothing, for too long."""
        for suspect in self._health.judge(self._state.sessions.values(), now):
            if session := self._state.sessions.get(suspect.session_id):
                self.detach(session, suspect.reason, suspect)
        for worker_id, (when, _) in list(self._lost.items()):
            if now - when > _LOST_KEPT_S:
                del self._lost[worker_id]

    def lacking(self) -> str:
        """Why no attached worker may be given work; "" if one may."""
        sessions = self._state.sessions.values()
        if any(self.trusts(session) for session in sessions):
            return ""
        if not sessions:
            return "waits for workers: none is attached"
        given_up = sum(bool(session.given_up) for session in sessions)
        but = f" or are given up ({given_up}): their hosts cost more than they bring" if given_up else ""
        return f"waits for workers: of {len(sessions)} attached, all drain or were lost too often{but}"

    def trusts(self, session: WorkerSession) -> bool:
        """Whether the worker may be given rollouts at all."""
        return not session.draining and not session.given_up and not self.shunned_s(session)

    def shunned_s(self, session: WorkerSession) -> float:
        """For how much longer a worker that was lost too often gets no work."""
        return self._flapping.shunned_s(session.worker_id, time.monotonic())

    def hear(self, session: WorkerSession, message: msgspec.Struct) -> None:
        """Take in one control message."""
        self._health.heard(session, time.monotonic())
        match message:
            case HeartbeatReport():
                if session.hear(message, time.monotonic()):
                    self._turned(session)
                session.draining |= message.state is WorkerState.DRAINING
                session.state = WorkerState.DRAINING if session.draining else message.state
            case InstalledReport():
                self._installed(session, message)
            case InstallFailedReport():
                self._install_failed(session, message)
            case EngineChangedReport():
                self._engine_changed(session, message)
            case ReleasedReport():
                self._released(session, message)
            case DrainNotice():
                session.draining, session.state = True, WorkerState.DRAINING
                session.reason = message.reason or session.reason
                text = f"worker {session.worker_id} drains" + (f": {message.reason}" if message.reason else "")
                self._news.of_worker(session, text, "draining", deadline=message.deadline_s)

    def _turned(self, session: WorkerSession) -> None:
        """The host of a borrowed worker took itself back, or gave itself again: there may be something to place."""
        if session.standing:
            metrics.reclaims.inc()
        log.debug("reclaimed" if session.standing else "granted", worker_id=session.worker_id)
        self._state.wake.set()

    def drain(self, worker_id: str, within_s: float) -> int:
        """Ask a worker to hand over and leave within so many seconds; it is given nothing more. Returns the number of
        rollouts that it has. A repeat tells it again, so that a nearer deadline counts. Raises `NotFound`.
        """
        session = next((one for one in self._state.sessions.values() if one.worker_id == worker_id), None)
        if session is None:
            raise NotFound(f"no worker {worker_id} is attached; `ebbtide workers` lists those that are")
        session.draining, session.state, session.reason = True, WorkerState.DRAINING, "asked to leave"
        session.outbox.put_nowait(fleet_pb2.CoordinatorMessage(drain=fleet_pb2.Drain(deadline_s=within_s)))
        log.info("drain", worker_id=worker_id, within_s=within_s, rollouts=len(session.attempts))
        return len(session.attempts)

    def _installed(self, session: WorkerSession, message: InstalledReport) -> None:
        if message.run_id not in self._state.runs:
            session.say_over(message.run_id)  # it pulled while it was not attached, perhaps, and was never told
            return
        session.installed = (message.run_id, message.version)
        session.unfit.pop(message.run_id, None)
        if (changing := session.changing) is not None and changing.run_id == message.run_id:
            if not changing.restarted:
                self._state.changes.learn(session.worker_id, time.monotonic() - changing.at)
            session.changing = None
        if run := self._state.runs.get(message.run_id):
            run.failed_installs.pop(message.version.version, None)
            run.fitted = True
            run.misfits.clear()
            run.architecture = session.hello.engine.architecture
        self._state.wake.set()
        if not message.pull_s and not message.pause_s:
            return  # it had the version already: nothing was installed
        if run:
            self._news.installed(run, session, message)
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
        """The worker's engine was started anew: for what it was asked for, or, where that failed, for its own model."""
        session.hello = msgspec.structs.replace(session.hello, engine=message.engine)
        session.installed = None
        metrics.engine_starts.inc()
        text = f"the engine of worker {session.worker_id} was started anew, for {message.engine.model}"
        self._news.of_worker(session, text, "changed", seconds=message.seconds)
        log.info("engine changed", worker_id=session.worker_id, run_id=message.run_id, seconds=message.seconds)
        self._state.wake.set()

    def _install_failed(self, session: WorkerSession, message: InstallFailedReport) -> None:
        changing, session.target, session.changing = session.changing, None, None
        asked = changing is not None and changing.restarted and changing.run_id == message.run_id
        version = message.version.version
        log.warning("install failed", worker_id=session.worker_id, run_id=message.run_id, reason=message.message)
        if (run := self._state.runs.get(message.run_id)) is None:
            session.say_over(message.run_id)  # what it has pulled so far is kept for the next try
            return
        now = time.monotonic()
        if message.architecture:
            run.architecture = message.architecture
            if asked:
                refused(session, message.architecture, now)
            elif may_change(run, session, now):  # it is asked to, when that pays
                self._state.wake.set()
                return
        session.unfit[message.run_id] = now + _INSTALL_PAUSE_S
        text = f"worker {session.worker_id} could not install version {version}: {message.message}"
        key = f"install.{session.worker_id}.{version}"
        self._news.tell(run, RunEvent(kind="warning", key=key, message=text, labels={"worker": session.worker_id}))
        if message.architecture and not run.fitted:
            run.misfits[message.architecture] += 1
            run.architecture = message.architecture
        if not message.unreachable:  # else it can be had again once the relay is back
            failures = run.failed_installs[version] = run.failed_installs.get(version, 0) + 1
            if failures >= _INSTALL_FAILURES and version < max(run.versions, default=0):
                run.versions.pop(version, None)
        self._state.wake.set()

    def _released(self, session: WorkerSession, message: ReleasedReport) -> None:
        cause = EndCause(message.cause)
        if cause is EndCause.WRONG_VERSION:  # it has another version than we thought: ask again
            session.installed = session.target = None
        why = EndReason(cause, message.reason or "handed back", blames(cause))
        orphaned = OrphanedAttempt(time.monotonic(), why)
        for ref in message.attempts:
            attempt = session.attempts.get(ref.attempt_id)
            if attempt is None or attempt.ref != ref:
                continue
            if cause is EndCause.MOVED and attempt.target:  # a move that was given up meanwhile has no target
                attempt.orphan(OrphanedAttempt(orphaned.due, EndReason(cause, f"moved to {attempt.target}")))
            else:
                attempt.orphan(orphaned)
        self._state.reap.set()
        self._state.wake.set()

    def session(self, session_id: str) -> WorkerSession:
        """The session that a message names. Raises `NotFound` for one that is over or of another coordinator's life."""
        if (session := self._state.sessions.get(session_id)) is not None:
            self._health.heard(session, time.monotonic())
            return session
        if (session := self._closing.get(session_id)) is not None:
            return session
        raise NotFound("this session is over; attach again on the control stream")

    def workers(self) -> list[Worker]:
        """All attached workers, and those lost lately."""
        listed = [self._listed(session, session.state) for session in self._state.sessions.values()]
        return sorted([*listed, *(worker for _, worker in self._lost.values())], key=lambda one: one.worker_id)

    def engines(self) -> list[EngineInfo]:
        """What attached workers generate with, and those lost lately, whose like may come again."""
        lost = [worker.engine for _, worker in self._lost.values() if worker.engine]
        return [session.hello.engine for session in self._state.sessions.values()] + lost

    def _listed(self, session: WorkerSession, state: WorkerState) -> Worker:
        beat, shunned_s = session.beat, self.shunned_s(session)
        if shunned_s and state not in {WorkerState.DRAINING, WorkerState.LOST, WorkerState.SUSPECTED}:
            state = WorkerState.SHUNNED
        return Worker(
            worker_id=session.worker_id,
            kind=session.hello.kind,
            state=state,
            slots=session.hello.slots,
            site=session.hello.site,
            running=len(session.attempts),
            tokens_per_s=beat.tokens_per_s,
            installed=(session.installed[1],) if session.installed else session.hello.installed,
            last_heartbeat_s=self._health.quiet_s(session, time.monotonic()),
            tokens_generated=beat.tokens_generated,
            busy_s=beat.busy_s,
            uptime_s=beat.uptime_s,
            engine=session.hello.engine,
            waiting=len(session.pending),
            plateau=session.plateau,
            shunned_s=shunned_s,
            reason="it was lost too often" if state is WorkerState.SHUNNED else session.reason or session.given_up,
            borrowed=beat.borrowed if session.borrowed else None,
            given_up=bool(session.given_up),
        )

    def leave(self) -> None:
        """This coordinator ends: from here on broken streams are its own doing, and workers keep their attempts."""
        self._leaving = True


def _lost_at_most(attempt: RunningAttempt, session: WorkerSession, now: float) -> int:
    """Tokens that may have gone with a worker: its flush window, or what it can have made since it sent some last, at
    twice its usual rate; whichever is less.
    """
    most = attempt.max_tokens - attempt.stored
    if session.hello.flush_tokens:
        most = min(most, session.hello.flush_tokens)
    started = len(session.attempts) - len(session.pending)
    if started and (rate := session.beat.tokens_per_s / started):
        most = min(most, math.ceil(2 * rate * (now - session.progressed)))
    return max(0, most)
