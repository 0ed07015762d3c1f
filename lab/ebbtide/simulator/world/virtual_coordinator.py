"""Runs the coordinator in virtual time: its real state, registry and decisions, over a store that is a dictionary.

The store's scripts are all that is modelled here: a rollout's stored tokens, its attempts, and what a lost attempt
leaves behind (`requeue.lua`).

Invariant: a rollout of `_rollouts` is queued or running in its `RunState`, never both, until it ends or is cancelled.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Final, Protocol

from msgspec import Struct

from ebbtide.coordinator.fleet.flush_intervals import FlushIntervals
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.rules.placement import Placement, dead_letter_message
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.run_events import SilentRunEvents
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_records import due_orphans, queued_again, started
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.outcome import SimulationBooks
from ebbtide.simulator.world.fleet.attempt_host import Response
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.fleet.version_pulls import VersionPulls
from ebbtide.simulator.world.virtual_time import VirtualTime, VirtualWakeups
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import EndCause, EndReason
from ebbtide.types.run import BatchSpec, EnvironmentSpec, RunSpec, Sampling, ShareSpec, TailSpec
from ebbtide.types.weights import PolicyVersion

#: As `requeue.lua`: workers remembered per rollout, the newest.
_AVOIDED: Final = 16


class SimulatedRollout(Struct, kw_only=True, eq=False, gc=False):
    """One turn of an episode. Lengths in tokens."""

    rollout_id: str
    episode_id: str
    run: str
    step: int
    group: int  # number of its prompt in the step
    bounds: VersionBounds
    prompt: int
    length: int  # of the whole response: what its model would say, however often it is interrupted
    prefix: str  # names the first turn's prompt, which the samples of a group share
    after: tuple[str, ...] = ()  # the rollouts of the turns before, the last one first
    place: int = 0
    stored: int = 0
    attempts: int = 0
    no_progress: int = 0
    avoid: tuple[str, ...] = ()
    home: str = ""

    def avoid_worker(self, worker: str) -> None:
        """Remember a worker that fell silent with it."""
        if worker not in self.avoid:
            self.avoid = (worker, *self.avoid)[:_AVOIDED]


#: The model has one policy per run.
_POLICY: Final = "policy"


class Decider(Protocol):
    """Decides where rollouts run: Ebbtide's own round, or a rival's."""

    #: Whether what a lost worker had stored goes on elsewhere; else its rollouts begin again.
    keeps: bool

    def kept(self, rollout: SimulatedRollout) -> int:
        """Tokens that a rollout has when it goes on elsewhere."""
        return rollout.stored if self.keeps else 0

    def response(self, rollout: SimulatedRollout) -> Response:
        """What a worker has to make of a rollout."""
        return Response(rollout.prompt, rollout.length, rollout.prefix, rollout.after)

    def round(self, now: float) -> float:
        """Decide, and have it done by the coordinator. Returns the longest pause until the next round, seconds."""
        ...

    def gather_s(self) -> float:
        """For how long changes are gathered before a round."""
        ...


class RolloutOwner(Protocol):
    """Who submits a run's rollouts."""

    def ended(self, rollout: SimulatedRollout) -> None:
        """Note that a rollout has its whole response."""
        ...


class RunAccount(Struct, frozen=True, kw_only=True):
    """What the coordinator must know of a run."""

    name: str
    model: str
    max_tokens: int  # of a response
    share: ShareSpec = ShareSpec()
    tail: TailSpec = TailSpec()
    groups: int = BatchSpec().groups_per_step  # of a step


class VirtualCoordinator:
    def __init__(
        self,
        time: VirtualTime,
        books: SimulationBooks,
        pulls: VersionPulls,
        decider: "Callable[[VirtualCoordinator], Decider]",
        settings: CoordinatorSettings | None = None,
    ) -> None:
        self.settings = settings or CoordinatorSettings()
        self._time, self._books, self._pulls = time, books, pulls
        self._wakeups = VirtualWakeups(time)
        self.state = CoordinatorState(time.clock, self._wakeups)
        self.trust, self.run_events, sessions = WorkerTrust(self.state), SilentRunEvents(), count(1)
        self.registry = WorkerRegistry(
            self.settings, self.state, self.trust, self.run_events, new_id=lambda: f"s{next(sessions):06}"
        )
        self._flushes = FlushIntervals(
            self.state, per_s=self.settings.flushes_per_s, interactive=self.settings.interactive_rollouts
        )
        self._drivers: dict[str, RolloutOwner] = {}
        self._max_tokens: dict[str, int] = {}
        self._rollouts: dict[str, SimulatedRollout] = {}
        self._workers: dict[str, SimulatedWorker] = {}  # by session
        self._attempts = count(1)
        self.decider = decider(self)

    def begin(self) -> None:
        """Begin the loops."""
        self._wakeups.begin(self._decide, self._reap, self.decider.gather_s)
        self._judge()
        self._pace()

    # Its loops.

    def _decide(self) -> float:
        if not self.state.sessions:
            return inf  # a worker that attaches is a change
        pause = self.decider.round(self._time.now)
        for worker in self._workers.values():
            worker.obey()
        return pause

    def _judge(self) -> None:
        if self.state.sessions:
            for _ in self.registry.judge(self._time.now):
                pass
        if len(self._workers) > len(self.state.sessions):  # some were given up
            over = [one for name, one in self._workers.items() if name not in self.state.sessions]
            self._workers = {name: one for name, one in self._workers.items() if name in self.state.sessions}
            for worker in over:
                worker.session_over()
        # Between heartbeats nothing new is known: four looks are enough, as many as live.
        every_s = max(self.registry.judge_every_s, self.settings.heartbeat_s / 4)
        self._time.after(every_s, self._judge)

    def _pace(self) -> None:
        self._flushes.pace()
        self._time.after(1.0, self._pace)

    def _reap(self) -> float:
        """Queue again what lost its worker. Returns when the next orphan is due; inf for none."""
        now, next_due = self._time.now, inf
        for run in self.state.at_work(now):
            orphans, later = due_orphans(run, now)
            next_due = min(next_due, later)
            for orphaned, attempts in orphans.items():
                for attempt in attempts:
                    self._requeue(run, attempt, orphaned.why)
        return next_due

    def _requeue(self, run: RunState, attempt: RunningAttempt, why: EndReason) -> None:
        rollout = self._rollouts[attempt.rollout.rollout_id]
        if rollout.stored > attempt.start:
            rollout.no_progress = 0
        elif why.blame:
            rollout.no_progress += 1
        self._books.moves += why.cause is EndCause.MOVED
        if why.avoid:
            rollout.avoid_worker(rollout.home)
        kept = self.decider.kept(rollout)
        self._books.tokens.twice += rollout.stored - kept
        rollout.stored = kept
        limit = self.settings.max_stalled_attempts
        if dead_letter_message(rollout.no_progress, "no token", limit=limit):
            rollout.no_progress = 0  # the driver plays the sample again
        stored, avoid, no_progress = rollout.stored, frozenset(rollout.avoid), rollout.no_progress
        now = self._time.now
        run.put_back(attempt, queued_again(attempt, stored=stored, avoid=avoid, no_progress=no_progress, now=now))

    # What decisions come to.

    def start(self, run: RunState, placements: Sequence[Placement]) -> None:
        """Give queued rollouts to workers."""
        batches: dict[str, list[RunningAttempt]] = defaultdict(list)
        for rollout_id, session_id in placements:
            session = self.state.sessions[session_id]
            queued = run.take_queued(rollout_id)
            if queued is None:
                continue
            rollout = self._rollouts[rollout_id]
            rollout.attempts += 1
            rollout.home = session.worker_id
            self._books.resumes += rollout.attempts > 1
            attempt = started(
                run,
                queued,
                f"a{next(self._attempts)}",
                stored=rollout.stored,
                max_tokens=self._max_tokens[run.run_id],
                number=rollout.attempts,
                now=self._time.now,
            )
            if run.start(attempt, session):
                batches[session_id].append(attempt)
        for session_id, attempts in batches.items():
            self._workers[session_id].assign(attempts)

    def fail(self, run: RunState, letters: Sequence[tuple[str, str]]) -> None:
        """End queued rollouts that no worker can serve. A scenario that has any is wrong: raises `InvalidRequest`."""
        queued = [letter for letter in letters if letter[0] in run.queue]
        if queued:
            raise InvalidRequest(f"{queued[0][1]}; {len(queued)} rollouts cannot run", field=f"run {run.run_id}")

    # Workers.

    def attach(self, worker: SimulatedWorker, hello: AttachReport) -> WorkerSession:
        session, _, superseded = self.registry.attach(hello)
        self._workers[session.session_id] = worker
        self._flushes.attached(session)
        session.outbox.cancel(superseded)
        return session

    def hear(self, session: WorkerSession, report: Struct) -> None:
        self.registry.hear(session, report)

    def stored(self, session: WorkerSession, attempts: Sequence[RunningAttempt], ends: Sequence[int]) -> None:
        """Store the tokens of attempts, until `ends` of each response."""
        now = self._time.now
        session.append_stream.tokens_came(now)
        by_run: dict[RunState, tuple[list[RunningAttempt], list[int]]] = {}
        for attempt, end in zip(attempts, ends, strict=True):
            if not attempt.started and end > attempt.start:
                attempt.begin(now)
            self._rollouts[attempt.rollout.rollout_id].stored = end
            found = by_run.setdefault(attempt.run, ([], []))
            found[0].append(attempt)
            found[1].append(end)
        for run, (some, some_ends) in by_run.items():
            run.accept_tokens(some, some_ends)

    def finished(self, attempt: RunningAttempt) -> None:
        """A worker's attempt has made the whole response."""
        run, rollout_id = attempt.run, attempt.rollout.rollout_id
        rollout = self._rollouts.get(rollout_id)
        if rollout is None or run.running.get(rollout_id) is not attempt or attempt.session is None:
            return
        self.stored(attempt.session, [attempt], [rollout.length])
        run.finish(rollout_id, attempt.attempt_id)
        del self._rollouts[rollout_id]
        self._books.tokens.kept += rollout.length
        self._drivers[run.run_id].ended(rollout)

    def stream_broke(self, session: WorkerSession, reason: str) -> None:
        self.registry.detach(session, reason)
        self._workers.pop(session.session_id, None)

    def response(self, rollout_id: str) -> Response:
        return self.decider.response(self._rollouts[rollout_id])

    def rollout(self, rollout_id: str) -> SimulatedRollout:
        """An open rollout as the store has it."""
        return self._rollouts[rollout_id]

    def worker(self, session_id: str) -> SimulatedWorker:
        """The worker behind a session, for policies that are told more than the coordinator knows."""
        return self._workers[session_id]

    def pull(self, worker: SimulatedWorker, run_id: str, version: int, done: Callable[[], None]) -> Callable[[], None]:
        return self._pulls.begin(run_id, version, worker.versions.get(run_id, 0), worker.terms.link_bytes_per_s, done)

    # Runs.

    def add_run(self, account: RunAccount, driver: RolloutOwner) -> None:
        spec = RunSpec(
            name=account.name,
            model=account.model,
            policy=_POLICY,
            environment=EnvironmentSpec(name="simulated"),
            sampling=Sampling(max_tokens=account.max_tokens),
            share=account.share,
            batch=BatchSpec(groups_per_step=account.groups),
            tail=account.tail,
        )
        live = self.state.add_run(account.name, spec)
        with live.mirror.rereading():
            live.reread({}, live.new_queue(), {})
        live.mirror.note_reconciled()
        self._drivers[account.name] = driver
        self._max_tokens[account.name] = account.max_tokens

    def submit(self, rollouts: Sequence[SimulatedRollout]) -> None:
        for one in rollouts:
            run = self.state.runs[one.run]
            self._rollouts[one.rollout_id] = one
            run.admit(
                QueuedRollout(
                    rollout_id=one.rollout_id,
                    episode_id=one.episode_id,
                    bounds=one.bounds,
                    length=one.prompt,
                    place=one.place,
                    since=self._time.now,
                    budget=self._max_tokens[one.run],
                    group=run.episodes.group_place(f"{one.step}.{one.group}", one.place),
                    step=one.step,
                )
            )

    def cancel(self, rollouts: Sequence[SimulatedRollout]) -> None:
        """Abandon rollouts: what they made is dropped."""
        for one in rollouts:
            run = self.state.runs[one.run]
            self._rollouts.pop(one.rollout_id, None)
            self._books.tokens.dropped += one.stored
            attempt = run.running.get(one.rollout_id)
            session = attempt.session if attempt else None
            run.end(one.rollout_id)
            if attempt is not None and session is not None:
                session.outbox.cancel([attempt.ref])

    def announce(self, run_id: str, version: int, step: int) -> None:
        self._pulls.publish(run_id, version)
        run = self.state.runs[run_id]
        run.versions.announce(PolicyVersion(policy=_POLICY, version=version, parent=version - 1, step=step))

    @property
    def unfinished(self) -> int:
        return len(self._rollouts)
