"""Gives each worker its run, version and rollouts: shows the state to the rules in `scheduling`, and carries out their
answers.

Three loops run. `decide` acts on changes; `reap` re-queues orphans and deletes ended runs; both retry while the store
is away. `watch` judges the workers, and waits only for the clock.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.dispatcher.borrowed_hosts import BorrowedHosts
from ebbtide.coordinator.dispatcher.rebalancer import Rebalancer, borrowable
from ebbtide.coordinator.dispatcher.worker_allocator import WorkerAllocator
from ebbtide.coordinator.failover.run_recovery import RunRecovery
from ebbtide.coordinator.fleet.engine_changes import EngineChanges
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.publisher_keys import PublisherKeys
from ebbtide.coordinator.state.attempt_transitions import AttemptTransitions
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_event_writer import RunEventWriter
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import StoreUnavailable
from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.placement import outsized, place
from ebbtide.scheduling.dispatch.target_versions import ServedVersion, fits_nowhere, target_versions, unservable
from ebbtide.types.rollout import DropReason
from ebbtide.types.run import RunEvent, RunStatus
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire.record_conversion import to_proto

log = telemetry.get_logger(__name__)
#: Pause after the first change, so that a burst is decided in one round.
_GATHER_S: Final = 0.005
#: Longest pause between rounds, because some decisions depend on time alone.
_TICK_S: Final = 0.25
#: Least time between two looks at workers' runs and versions: filling slots is more urgent.
_ARRANGE_S: Final = 0.05
_STORE_PAUSE_S: Final = 0.2
#: Rollouts placed by one store call: their prompts and partials come back in its reply.
_PLACE_AT_ONCE: Final = 128
#: How long a worker with a longer context has to attach for rollouts that need one; how often the queue is searched.
_LONGER_GRACE_S: Final = 30.0
_MEASURE_EVERY_S: Final = 1.0
#: How often the gauges are set; scrapes are no more frequent.
_OBSERVE_EVERY_S: Final = 1.0
#: A run without workers warns after so long: replacing a worker takes less.
_LACKING_S: Final = 1.0


class Dispatcher:
    """`slice_s`, `balance`: `slice_s` and `rebalance` of the settings."""

    def __init__(
        self,
        state: CoordinatorState,
        fleet: WorkerRegistry,
        attempts: AttemptTransitions,
        recovery: RunRecovery,
        publishers: PublisherKeys,
        run_events: RunEventWriter,
        *,
        slice_s: float,
        balance: bool = True,
    ) -> None:
        self._state, self._fleet, self._attempts, self._recovery = state, fleet, attempts, recovery
        self._publishers, self._run_events = publishers, run_events
        self._moves = Rebalancer(state, on=balance)
        self._borrowed = BorrowedHosts(state, self._moves, run_events)
        self._changes = EngineChanges(state)
        self._allocator = WorkerAllocator(state, fleet, self._moves, self._changes, slice_s=slice_s)
        self._arranged = self._measured = float("-inf")
        self._unarranged = False
        self._lacking: dict[str, float] = {}  # run -> since when it has work and no worker; inf after its warning

    async def decide_for_ever(self) -> None:
        while True:
            await self._state.wakeups.wait_to_decide(self._pause(), _GATHER_S)
            try:
                await self.decide()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))
                self._state.wakeups.decide()
                await asyncio.sleep(_STORE_PAUSE_S)

    async def watch_for_ever(self) -> None:
        """Judge the workers on time: a late judge finds lost workers late, or takes its own sleep for their silence."""
        observed = float("-inf")
        while True:
            await asyncio.sleep(self._fleet.judge_every_s)
            self._fleet.judge(now := time.monotonic())
            if now - observed >= _OBSERVE_EVERY_S:
                observed = now
                metrics.observe(self._state.runs.values(), self._fleet.workers())

    async def reap_for_ever(self) -> None:
        next_due: float | None = None
        self._recovery.serving()
        while True:
            pause = _TICK_S
            if next_due is not None:
                pause = min(pause, max(0.0, next_due - time.monotonic()))
            await self._state.wakeups.wait_to_reap(pause)
            now = time.monotonic()
            try:
                next_due = await self._attempts.requeue_due(now)
                await self._attempts.tally()
                await self._attempts.sweep_ended()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))
                next_due = now + _STORE_PAUSE_S

    def _pause(self) -> float:
        """Seconds until the next round if nothing changes."""
        return _ARRANGE_S if self._unarranged else _TICK_S

    async def decide(self) -> None:
        """One round: refresh stale mirrors, allot workers, send versions, fill free slots, move rollouts."""
        for run in list(self._state.runs.values()):
            async with self._attempts.while_it_lives(run):
                await self._recovery.refresh(run)
        now = time.monotonic()
        arrange = self._arranged + _ARRANGE_S <= now
        self._unarranged = not arrange
        if arrange:
            self._arranged = now
            await self._arrange(now)
        balance = self._moves.due(now)
        if balance:
            self._borrowed.judge(now)
            self._allocator.hand_over(now)
        for run in list(self._state.runs.values()):
            async with self._attempts.while_it_lives(run):
                await self._fill(run)
                if balance and not run.stale:  # what is still queued fits nowhere, or waits until others have started
                    hosts = self._hosts(run)
                    self._borrowed.release(run, hosts, now)
                    self._moves.decide(run, hosts, now)

    async def _arrange(self, now: float) -> None:
        """Allot workers and send versions; end rollouts and runs that no worker can serve."""
        self._allocator.decide(now)
        measure = now - self._measured >= _MEASURE_EVERY_S
        self._measured = now if measure else self._measured
        for run in list(self._state.runs.values()):
            self._send_versions(run, [s for s in self._state.sessions.values() if s.run_id == run.run_id])
            async with self._attempts.while_it_lives(run):
                await self._fail_misfit(run)
                await self._dead_letter_unservable(run)
                if measure:
                    await self._dead_letter_outsized(run)
            self._say_if_lacking(run, now)
        self._lacking = {run_id: since for run_id, since in self._lacking.items() if run_id in self._state.runs}

    def _say_if_lacking(self, run: RunState, now: float) -> None:
        """Warn once each time a run has work and no worker may serve it."""
        text = (self._fleet.lacking() or _barred(run, self._open_sessions())) if run.queue or run.running else ""
        if not text:
            self._lacking.pop(run.run_id, None)
        elif now - self._lacking.setdefault(run.run_id, now) >= _LACKING_S:
            self._lacking[run.run_id] = math.inf
            waiting = len(run.queue) + len(run.running)
            log.warning("no workers", run_id=run.run_id, rollouts=waiting)
            message = f"{text}; {waiting} rollouts go on when one comes"
            self._run_events.write(run, RunEvent(kind="warning", message=message, values={"rollouts": waiting}))

    def _open_sessions(self) -> list[WorkerSession]:
        """Workers that stay. Quarantined ones are among them: they pull weights, but get no rollouts."""
        return [session for session in self._state.sessions.values() if not session.draining]

    def _trusted_sessions(self, run: RunState) -> list[WorkerSession]:
        """Workers of the run that may get rollouts."""
        barred = run.spec.borrow.max_rollouts == 0
        return [
            one
            for one in self._state.sessions.values()
            if one.run_id == run.run_id and self._fleet.trusts(one) and not (barred and one.borrowed)
        ]

    def _send_versions(self, run: RunState, sessions: Iterable[WorkerSession]) -> None:
        """Tell workers which version to install; those that still hold another run's rollouts are told later."""
        now = time.monotonic()
        serving = [
            ServedVersion(
                worker_id=session.session_id,
                installed=session.version_of(run.run_id),
                running=len(session.attempts),
                held=frozenset(bounds for _, bounds in session.held),
            )
            for session in sessions
            if not session.draining
            and not session.given_up  # an install would disturb its host too
            and session.unfit.get(run.run_id, 0.0) <= now
            and not self._changes.forbids(run, session, now)
            and all(run_id == run.run_id for run_id, _ in session.held)
        ]
        for session_id, version in target_versions(serving, run.queue.bounds(), run.versions).items():
            session = self._state.sessions[session_id]
            if version not in run.versions or session.target == (run.run_id, version):
                continue
            # Sent even if it attached with this version: the former coordinator may have sent another run's since.
            message = fleet_pb2.Install(
                version=to_proto(run.versions[version], types_pb2.PolicyVersion),
                run_id=run.run_id,
                model=run.spec.model,
                publisher=self._publishers.public(run.run_id),
            )
            session.install(run.run_id, message, now, restart=self._changes.needed(run, session))

    async def _fail_misfit(self, run: RunState) -> None:
        """End a run whose weights no attached worker can install."""
        engines = [session.hello.engine for session in self._open_sessions()]
        attached = [engine.architecture for engine in engines]
        if run.architecture and self._changes.served_by_somebody(run, time.monotonic()):
            return
        if any(fits_nowhere(architecture, attached, tries) for architecture, tries in run.misfits.items()):
            serve = ", ".join(sorted({engine.model for engine in engines}))
            message = (
                f"its weights are of another architecture than the model of any worker: it names {run.spec.model}, "
                f"the workers serve {serve}; start workers with the run's model, then submit it again"
            )
            await self._attempts.end_run(run.run_id, RunStatus.FAILED, message, drop=DropReason.RUN_ENDED)

    async def _dead_letter_unservable(self, run: RunState) -> None:
        lost = {bounds for bounds in run.queue.bounds() if unservable(bounds, run.versions)}
        if not lost:
            return
        async with run.changing():
            found = [(one.rollout_id, one.bounds) for one in run.queue if one.bounds in lost]
            why = "no policy version in [{0.minimum}, {0.maximum}] can be had any more"
            await self._attempts.dead_letter(run, [(name, why.format(bounds)) for name, bounds in found])

    async def _dead_letter_outsized(self, run: RunState) -> None:
        sessions = self._open_sessions()
        contexts = [session.hello.engine.max_model_len for session in sessions]
        manned = min((session.attached for session in sessions), default=0.0)
        async with run.changing():
            found = outsized(run.queue, contexts, manned=manned, now=time.monotonic(), grace_s=_LONGER_GRACE_S)
            why = "{} tokens leave no room for more in the longest context attached ({})"
            letters = [(one.rollout_id, why.format(one.length, max(contexts))) for one in found]
            await self._attempts.dead_letter(run, letters)

    async def _fill(self, run: RunState) -> None:
        while run.queue and not run.stale:
            async with run.changing():  # look at workers only inside: they may leave while the lock is awaited
                hosts = [host for _, host in self._hosts(run)]
                if all(host.running >= host.slots for host in hosts):
                    return
                hosts += self._coming(run, time.monotonic())
                placements = place(
                    run.queue,
                    hosts,
                    run.homes,
                    at_most=_PLACE_AT_ONCE,
                    rest=lambda one: run.lengths.rest(one.made, one.budget or None),
                    borrowable=borrowable(run),
                    now=time.monotonic(),
                )
                if not placements:
                    return
                await self._attempts.start(run, placements, self._state.sessions)

    def _hosts(self, run: RunState) -> list[tuple[WorkerSession, HostView]]:
        """The workers that have a version of the run and may get its rollouts, full ones too."""
        return [(session, self._host(run, session)) for session in self._trusted_sessions(run) if _ready(run, session)]

    def _coming(self, run: RunState, now: float) -> list[HostView]:
        """Workers that get a version of the run soon, as full hosts: for rollouts that avoid all others."""
        newest = max(run.versions, default=0)
        return [
            HostView(
                worker_id=session.session_id,
                name=session.worker_id,
                slots=1,
                running=1,
                installed=newest,
                target=newest,
                max_model_len=session.hello.engine.max_model_len,
            )
            for session in self._trusted_sessions(run)
            if not _ready(run, session) and session.unfit.get(run.run_id, 0.0) <= now
        ]

    def _host(self, run: RunState, session: WorkerSession) -> HostView:
        pending, running, slots = len(session.pending), len(session.attempts), session.hello.slots
        said = session.beat.borrowed if session.borrowed else None
        return HostView(
            worker_id=session.session_id,
            name=session.worker_id,
            slots=slots,
            running=running,
            pending=pending,
            probation=sum(one.rollout.no_progress > 0 for one in session.pending.values()) if pending else 0,
            rate=self._moves.rate(session) if running < slots else 0.0,
            plateau=session.plateau,
            held=session.beat.held,
            installed=session.version_of(run.run_id),
            target=session.target[1] if session.target else 0,
            max_model_len=session.hello.engine.max_model_len,
            shut=session.reclaimed or (said is not None and said.asleep),
            borrowed=session.borrowed,
            share=said.share if said else 1.0,
            spell_s=said.spell_s if said else math.inf,
        )


def _ready(run: RunState, session: WorkerSession) -> bool:
    return session.target is not None and session.target[0] == run.run_id and session.version_of(run.run_id) > 0


def _barred(run: RunState, sessions: Sequence[WorkerSession]) -> str:
    """Why a run that may borrow nothing has no worker."""
    if run.spec.borrow.max_rollouts != 0 or any(not session.borrowed for session in sessions):
        return ""
    return "waits for workers: borrow.max_rollouts is 0 and only borrowed ones are attached; submit it with more"
