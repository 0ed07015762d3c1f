"""Assigns workers to runs by fair shares, and hands over the rollouts of the run that a worker leaves.

Invariant: only this class writes `WorkerSession.run_id` while the session is attached (except for a run's end, and a
worker that attaches with rollouts). A worker gets rollouts of that run only, and installs its weights once it holds
none of another run. Rollouts of the run that it leaves finish there if that is soon; others are handed over with their
tokens. Lost with the process: no run is owed anything then, and the cost of changes is learnt again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from typing import Final

import msgspec

from ebbtide import telemetry
from ebbtide.coordinator.dispatch.installs import EngineChanges
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer, free, remind
from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.rules.fair_share import (
    REST,
    Demand,
    LeftRun,
    RunDue,
    ShareAccounts,
    WorkerDemand,
    WorkerPost,
    allot,
    change_reason,
    entitled,
    turn_s,
)
from ebbtide.coordinator.rules.move_costs import COSTS, finishes_first
from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import ReleaseReason
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.run import RunEvent, RunShare, WorkerChange

log = telemetry.get_logger(__name__)
#: Largest share of the time spent on deciding: a large fleet is decided less often.
_LOAD: Final = 0.05
#: While starts give way, a run with so large a part of its slots free, and more than a worker's, does not wait for
#: workers.
_FREE: Final = 0.125
#: Reading counts for so long at most: a run without a worker waits for some turns of it, not for ever.
_LONGEST_READ_S: Final = 20.0
#: Rollouts of leaving workers in one step: some five milliseconds of a core.
_LOOKED_AT_ONCE: Final = 1_024


class WorkerAllocator:
    """`timeslice_s`: see the settings."""

    def __init__(
        self,
        state: CoordinatorState,
        trust: WorkerTrust,
        moves: Rebalancer,
        changes: EngineChanges,
        prefills: PrefillSpeeds,
        run_events: RunEvents,
        *,
        timeslice_s: float,
    ) -> None:
        self._state, self._trust, self._moves, self._timeslice_s = state, trust, moves, timeslice_s
        self._changes, self._prefills, self._run_events = changes, prefills, run_events
        self._accounted = state.clock()
        self._accounts, self._wants = ShareAccounts(self._accounted), WorkerDemand()
        self._due: dict[str, RunDue] = {}
        self._starved: dict[str, float] = {}  # run -> since when it has work and no worker
        self._next = 0.0

    def decide(self, now: float) -> None:
        """Update what runs are owed, and assign a run to each worker."""
        if now < self._next:
            return
        sessions = [one for one in self._state.sessions.values() if not one.draining]
        trusted: list[WorkerSession] = []
        others: list[WorkerSession] = []
        for one in sessions:
            (trusted if self._trust.trusts(one, now) else others).append(one)
        self._update_accounts(trusted, now)
        demands = self._demands(trusted, now)
        held = self._allot(trusted, demands, now)
        # Apart from the trusted ones: these only pull weights, so a run with no others is not served.
        self._allot(others, demands, now)
        self._tell(entitled(demands, len(trusted)), held)
        self._next = now + (self._state.clock() - now) / _LOAD

    def hand_over(self, now: float) -> Iterator[None]:
        """Ask workers for rollouts of runs that they leave, unless these finish soon: some in each step, so that others
        have their turn in between.
        """
        looked = 0
        for session in list(self._state.sessions.values()):
            leaves = any(run_id != session.run_id for run_id, _ in session.held)
            if session.gone or not (leaves or session.freed):
                continue
            remind(session, now)
            free(session, self._left(session, now) if leaves else (), ReleaseReason.ANOTHER_RUN, now)
            looked += len(session.attempts)
            if looked >= _LOOKED_AT_ONCE:
                looked = 0
                yield

    def _left(self, session: WorkerSession, now: float) -> list[RunningAttempt]:
        """Rollouts of runs that a worker leaves, and that it would not finish soon."""
        rate = self._moves.rate(session)
        return [
            one
            for one in session.attempts.values()
            if one.run_id != session.run_id
            and one.attempt_id not in session.freed
            and (run := self._state.runs.get(one.run_id))
            and not finishes_first(
                rest_s=run.lengths.rest(one.rollout, one.stored, one.max_tokens - one.stored) / rate if rate else inf,
                length=one.length,
                started=one.started,
                waited_s=now - session.since,
                prefill=self._prefills.typical,
            )
        ]

    def _update_accounts(self, sessions: Sequence[WorkerSession], now: float) -> None:
        made = {run.run_id: tokens for run in self._state.runs.values() if (tokens := run.take_made())}
        resting = sum(one.run_id == REST for one in sessions)
        # A rollout may begin and end between two calls.
        worked = (one for one in sessions if one.attempts or one.append_stream.progressed >= self._accounted)
        working, self._accounted = sum(one.run_id != REST for one in worked), now
        # As long as turns of the workers that are costliest to change: debts must suffice for those, too.
        turn = turn_s(self._timeslice_s, max(map(self._change_s, sessions), default=self._state.changes.typical()))
        self._accounts.tick(made, self._due, workers=working + resting, resting=resting, turn_s=turn, now=now)
        self._state.changes.keep({one.worker_id for one in self._state.sessions.values()})

    def _demands(self, sessions: Sequence[WorkerSession], now: float) -> list[Demand]:
        """The demands of the runs that have work and a version."""
        slots = sum(one.slots for one in sessions) / len(sessions) if sessions else 1.0
        runs = [run for run in self._state.runs.values() if run.versions.available]
        wanted = {run.run_id: float(ceil((len(run.queue) + len(run.running)) / slots)) for run in runs}
        cramped = {run.run_id for run in runs if self._cramped(run)}
        for run_id in cramped:  # further workers than its own
            wanted[run_id] += len(self._state.serving(run_id))
        believed = self._wants.believed(wanted, change_s=self._state.changes.typical(), now=now)
        served = {one.run_id for one in sessions}
        waits = (run_id for run_id in believed if run_id not in served or run_id in cramped)
        starved = {run_id: self._starved.get(run_id, now) for run_id in waits}
        self._starved = starved
        rate = self._accounts.rate
        return [
            msgspec.structs.replace(
                _demand(run),
                wants=believed[run.run_id],
                owed_s=self._accounts.owed_s(run.run_id),
                work_s=_tokens(run) / rate if rate else inf,
                starved_s=now - starved.get(run.run_id, now),
            )
            for run in runs
            if run.run_id in believed
        ]

    def _cramped(self, run: RunState) -> bool:
        """Whether something waits that is too long for the contexts of the run's workers."""
        contexts = [one.hello.engine.max_model_len for one in self._state.serving(run.run_id)]
        return bool(contexts and run.queue.not_shorter(max(contexts)))

    def _allot(self, sessions: Sequence[WorkerSession], demands: Sequence[Demand], now: float) -> Counter[str]:
        """Assign these workers; returns how many each run has. Runs that may borrow none get no borrowed workers. While
        no run has work, idle workers get weights in advance.
        """
        live = self._state.runs
        barred = {run.run_id for run in live.values() if run.spec.borrow.max_rollouts == 0}
        held = Counter(one.run_id for one in sessions)
        if not demands:
            demands = [_demand(run) for run in live.values() if run.versions.available]
            sessions = [one for one in sessions if one.run_id not in live]
        if len(demands) == 1 and _serve_it_alone(sessions, demands[0]):
            return held
        posts = [self._post(one, barred if one.borrowed else set(), now) for one in sessions]
        rest_s = self._accounts.owed_s(REST)
        runs = allot(posts, demands, now=now, timeslice_s=self._timeslice_s, rest_owed_s=rest_s)
        for session in sessions:
            run_id = runs[session.session_id]
            if session.run_id != run_id:
                self._tell_change(session, run_id)
                held.subtract((session.run_id,))
                held.update((run_id,))
                session.serve(run_id, now)
        return held

    def _tell_change(self, session: WorkerSession, run_id: str) -> None:
        """Tells both runs that a worker is about to change, and why."""
        left, gains = self._state.runs.get(session.run_id), self._state.runs.get(run_id)
        reason = change_reason(LeftRun(len(left.queue), len(left.running)) if left is not None else None)
        log.info("worker serves", worker_id=session.worker_id, run_id=run_id, reason=reason)
        if left is None or gains is None:
            return
        labels = {"worker": session.worker_id, "state": WorkerChange.WENT_OVER.value, "from": left.run_id, "to": run_id}
        text = f"worker {session.worker_id} goes over from run {left.run_id} to run {run_id}: {reason}"
        for run in (left, gains):
            self._run_events.write(run, RunEvent(kind="worker", message=text, labels=labels))

    def _post(self, session: WorkerSession, barred: set[str], now: float) -> WorkerPost:
        change_s = self._change_s(session)
        unfit = frozenset(run_id for run_id, until in session.unfit.items() if until > now)
        return WorkerPost(
            session_id=session.session_id,
            run_id=session.run_id,
            since=session.since,
            running=len(session.attempts),
            has=session.installed[0] if session.installed else "",
            unfit=unfit | barred | self._changes.barred(session, now),
            architecture=session.hello.engine.architecture,
            change_s=change_s,
            restart_s=change_s + session.beat.restart_s,
        )

    def _change_s(self, session: WorkerSession) -> float:
        """Seconds without service if the worker changes its run: also in which an engine reads what it hands over.
        Whole seconds of that, so that many workers cost the same.
        """
        _, context = self._moves.speed(session)
        read_s = COSTS.read_s(round(len(session.attempts) * context), self._prefills.typical)
        return self._state.changes.estimate(session.worker_id) + min(_LONGEST_READ_S, float(round(read_s)))

    def _held_back(self, run: RunState) -> bool:
        """Whether more workers would not help the run: starts give way, and its own workers have many free slots."""
        if not self._state.sheds(Work.STARTS):
            return False
        serving = [one for one in self._state.serving(run.run_id) if one.version_of(run.run_id)]
        slots = sum(one.slots for one in serving)
        taken = sum(min(one.slots, len(one.attempts)) for one in serving)
        return bool(serving) and slots - taken > max(_FREE * slots, slots / len(serving))

    def _tell(self, shares: Mapping[str, float], held: Mapping[str, int]) -> None:
        self._due = {}
        for run in self._state.runs.values():
            share = shares.get(run.run_id, 0.0)
            if run.run_id in shares:
                self._due[run.run_id] = RunDue(share, waits=bool(run.queue) and not self._held_back(run))
            workers = held.get(run.run_id, 0)
            run.note_share(RunShare(lately=self._accounts.lately(run.run_id), due=share, workers=workers))


def _serve_it_alone(sessions: Sequence[WorkerSession], demand: Demand) -> bool:
    """Whether the only run with a demand has all these workers, and keeps them: the plain case, decided at once."""
    serving = all(one.run_id == demand.run_id and not one.unfit for one in sessions)
    return serving and demand.ceiling is None


def _demand(run: RunState) -> Demand:
    share = run.spec.share
    return Demand(
        run_id=run.run_id,
        weight=share.weight,
        floor=share.floor,
        ceiling=share.ceiling,
        priority=share.priority,
        architecture=run.versions.architecture,
    )


def _tokens(run: RunState) -> float:
    """Tokens that the run's rollouts will probably still make."""
    return run.lengths.curve.rest(0) * (len(run.queue) + len(run.running))
