"""Gives each worker its run, version and rollouts: shows the state to the rules in `scheduling`, and carries out their
answers.

Three loops run. `decide` acts on changes; `reap` re-queues orphans and deletes ended runs; both retry while the store
is away. `watch` judges the workers, and waits only for the clock.
"""

import asyncio
import math
import time
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.dispatcher.borrowed_hosts import BorrowedHosts
from ebbtide.coordinator.dispatcher.host_views import HostViews
from ebbtide.coordinator.dispatcher.install_sender import InstallSender
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
from ebbtide.scheduling.dispatch.placement import outsized, place
from ebbtide.scheduling.dispatch.start_pacing import StartPacing
from ebbtide.scheduling.dispatch.target_versions import fits_nowhere, unservable
from ebbtide.types.rollout import DropReason
from ebbtide.types.run import RunEvent, RunStatus

log = telemetry.get_logger(__name__)
#: Pause after the first change, so that a burst is decided in one round. A round looks at all workers: with more than
#: `_GATHER_FLEET` of them it is longer in proportion, up to `_GATHER_MOST_S`.
_GATHER_S: Final = 0.01
_GATHER_FLEET: Final = 200
_GATHER_MOST_S: Final = 0.05
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


def gather_s(workers: int) -> float:
    """How long changes are gathered before a round."""
    return min(_GATHER_MOST_S, _GATHER_S * max(1.0, workers / _GATHER_FLEET))


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
        self._run_events = run_events
        self._moves = Rebalancer(state, on=balance)
        self._borrowed = BorrowedHosts(state, self._moves, run_events)
        self._changes = EngineChanges(state)
        self._allocator = WorkerAllocator(state, fleet, self._moves, self._changes, slice_s=slice_s)
        self._hosts = HostViews(state, fleet, self._moves)
        self._installs = InstallSender(state, self._changes, publishers)
        self._arranged = self._measured = float("-inf")
        self._unarranged = False
        self._starts = StartPacing()
        self._last_started = ""  # the run that got the last rollouts before starts were held
        self._lacking: dict[str, float] = {}  # run -> since when it has work and no worker; inf after its warning

    async def decide_for_ever(self) -> None:
        while True:
            await self._state.wakeups.wait_to_decide(self._pause(), gather_s(len(self._state.sessions)))
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
            await self._fleet.judge(now := time.monotonic())
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
        pause = _ARRANGE_S if self._unarranged else _TICK_S
        held_s = self._starts.held_s(time.monotonic())
        return min(pause, held_s) if held_s else pause

    async def decide(self) -> None:
        """One round: refresh stale mirrors, allot workers, send versions, fill free slots, move rollouts."""
        await self._recovery.try_skipped()
        for run in self._state.at_work(time.monotonic()):
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
            await asyncio.sleep(0)
            for _ in self._moves.learn(now):
                await asyncio.sleep(0)
            self._borrowed.judge(now)
            self._allocator.hand_over(now)
            await asyncio.sleep(0)  # in a large fleet each of these takes a while: others have their turn
        for run in self._in_turn(now):
            async with self._attempts.while_it_lives(run):
                await self._fill(run)
                held = self._starts.held_s(time.monotonic())  # then free slots are for what is queued
                if balance and not run.stale and not held:  # what is still queued fits nowhere, or waits for others
                    hosts = self._hosts.of(run)
                    self._borrowed.release(run, hosts, now)
                    self._moves.decide(run, hosts, now)
                    await asyncio.sleep(0)

    def _in_turn(self, now: float) -> list[RunState]:
        """The runs, from the one after that which got the last rollouts before starts were held."""
        runs = self._state.at_work(now)
        first = next((i + 1 for i, run in enumerate(runs) if run.run_id == self._last_started), 0)
        return runs[first:] + runs[:first]

    async def _arrange(self, now: float) -> None:
        """Allot workers and send versions; end rollouts and runs that no worker can serve."""
        self._allocator.decide(now)
        await asyncio.sleep(0)
        measure = now - self._measured >= _MEASURE_EVERY_S
        self._measured = now if measure else self._measured
        for run in self._state.at_work(now):
            self._installs.send(run, now)
            async with self._attempts.while_it_lives(run):
                await self._fail_misfit(run)
                await self._dead_letter_unservable(run)
                if measure:
                    await self._dead_letter_outsized(run)
            self._say_if_lacking(run, now)
            await asyncio.sleep(0)
        self._lacking = {run_id: since for run_id, since in self._lacking.items() if run_id in self._state.runs}

    def _say_if_lacking(self, run: RunState, now: float) -> None:
        """Warn once each time a run has work and no worker may serve it."""
        text = (self._fleet.lacking() or self._barred(run)) if run.queue or run.running else ""
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

    async def _fail_misfit(self, run: RunState) -> None:
        """End a run whose weights no attached worker can install."""
        if not run.misfits:
            return
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
        old = [bounds for bounds in run.queue.bounds() if bounds.maximum and bounds.maximum < run.newest]
        lost = {bounds for bounds in old if unservable(bounds, run.versions)}
        if not lost:
            return
        why = "no policy version in [{0.minimum}, {0.maximum}] can be had any more"
        letters = [(one.rollout_id, why.format(one.bounds)) for one in run.queue if one.bounds in lost]
        await self._attempts.dead_letter(run, letters)

    async def _dead_letter_outsized(self, run: RunState) -> None:
        sessions = self._open_sessions()
        contexts = [session.hello.engine.max_model_len for session in sessions]
        longest, manned = max(contexts, default=0), min((session.attached for session in sessions), default=0.0)
        long, now = run.queue.not_shorter(longest), time.monotonic()
        why = "{} tokens leave no room for more in the longest context attached ({})"
        found = outsized(long, contexts, manned=manned, now=now, grace_s=_LONGER_GRACE_S)
        await self._attempts.dead_letter(run, [(one.rollout_id, why.format(one.length, longest)) for one in found])

    async def _fill(self, run: RunState) -> None:
        while run.queue and not run.stale and self._state.has_room(run.run_id):
            if self._starts.held_s(time.monotonic()):
                return
            async with run.changing():  # look at workers only inside: they may leave while the lock is awaited
                hosts = [host for _, host in self._hosts.of(run)]
                if all(host.running >= host.slots for host in hosts):
                    return
                now = time.monotonic()
                placements = place(
                    run.queue,
                    hosts + self._hosts.coming(run, now),
                    run.homes,
                    at_most=_PLACE_AT_ONCE,
                    rest=lambda one: run.lengths.rest(one.made, one.budget or None),
                    borrowable=borrowable(run),
                    now=now,
                )
                if not placements:
                    return
                await self._attempts.start(run, placements, self._state.sessions)
            began = time.monotonic()
            await asyncio.sleep(0)
            if self._starts.note_turn((now := time.monotonic()) - began, now):
                self._last_started = run.run_id

    def _barred(self, run: RunState) -> str:
        """Why a run that may borrow nothing has no worker."""
        if run.spec.borrow.max_rollouts != 0 or any(not session.borrowed for session in self._open_sessions()):
            return ""
        return "waits for workers: borrow.max_rollouts is 0 and only borrowed ones are attached; submit it with more"
