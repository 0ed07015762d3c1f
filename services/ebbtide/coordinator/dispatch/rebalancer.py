"""Learns how fast each worker is, and moves rollouts from one worker to another.

Invariant: an attempt has a `target` from the request to its worker until it ends or the worker's time is up, and a
rollout is moved only once in a while. Lost with the process: attempts that were asked back go to any worker, and speeds
are learnt again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.coordinator.dispatch.moves import (
    EngineLoad,
    MovePromise,
    MoveSearch,
    RolloutMove,
    RunningRollout,
    rebalance,
)
from ebbtide.coordinator.dispatch.speeds import FleetSpeeds
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_messages import ReleaseReason
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import AttemptRef, WorkerState

log = telemetry.get_logger(__name__)
#: A few times a second is enough: a move pays off over seconds.
_EVERY_S: Final = 0.25
#: How long a worker may take to hand an attempt back; and for how long its rollout then stays at least.
_HANDOVER_S: Final = 10.0
_AGAIN_S: Final = 30.0
#: A span teaches no speed if so large a share of the rollouts began or ended in it,
_CHURN: Final = 0.25
#: if it is longer than this, so that rollouts may have begun and ended unseen,
_LONGEST_S: Final = 10.0
#: if it was observed less often than this, or a message waited so long for the store,
_BLIND_S: Final = 0.5
_STORING_S: Final = 0.25
#: or if so large a share at its end passed without a token.
_QUIET: Final = 0.5
#: While an engine read prompts for a larger share of a span, it shows no decoding, unless nothing is known of it.
_READING: Final = 0.5
#: Workers whose heartbeats are looked at in one step.
_PART: Final = 100
#: Queued rollouts of which some may fit nowhere.
_LOOKED_AT: Final = 8
#: The speed of a worker that left is kept for so long: it may come back under its name.
_REMEMBERED_S: Final = 600.0


class _UnknownSpeed:
    """Of an engine while nothing is known of any."""

    def rate(self, running: float, context: float) -> float:  # noqa: ARG002
        return 0.0


_UNKNOWN: Final = _UnknownSpeed()


class _Asked(Struct, frozen=True):
    attempt: RunningAttempt
    source: str
    target: str
    when: float
    stays_s: float  # for how long its rollout does not move again
    stored: int  # tokens of the rollout then
    promise: MovePromise | None  # of one that had started

    @property
    def here(self) -> bool:
        """Whether the attempt is still at the worker that was asked."""
        session = self.attempt.session
        return session is not None and session.session_id == self.source


class _Beat(Struct):
    """A heartbeat, and the attempts that ran then."""

    beat: HeartbeatReport
    running: frozenset[str]
    reading: bool  # a prompt was being read then: how much of that came later is not known
    disturbed: bool = False  # the worker was held up since then: its tokens do not show its speed
    latest: HeartbeatReport | None = None  # those in between came while a prompt was being read


class Rebalancer:
    def __init__(self, state: CoordinatorState, *, on: bool) -> None:
        self._state, self._on = state, on
        self._speeds: dict[str, WorkerThroughput] = {}  # by worker id
        self._seen: dict[str, float] = {}  # when those were attached last
        self._beats: dict[str, _Beat] = {}  # by session
        self._contexts: dict[str, float] = {}
        self._fleet = FleetSpeeds()
        self._asked: dict[tuple[str, str], _Asked] = {}  # by run and rollout
        self._searches: dict[str, MoveSearch] = {}  # by run
        self._next = float("-inf")
        self._blind = False  # the last round was long ago: what a worker's tokens show is not known
        self.lesson = 0  # grows when a typical speed may have changed

    def rate(self, session: WorkerSession) -> float:
        """Tokens/s of each of its rollouts with one more; 0.0 while nothing is known of any worker."""
        curve = self._fleet.curve(session)
        return curve.rate(len(session.attempts) + 1) if curve is not None else 0.0

    def knows(self, session: WorkerSession) -> bool:
        """Whether the worker's own speed is known: then `rate` is looked up again with its `revision` only, which grows
        with each heartbeat.
        """
        return self._speed_of(session).span[1] > 0.0

    def _speed_of(self, session: WorkerSession) -> WorkerThroughput:
        if (speed := self._speeds.get(session.worker_id)) is None:
            speed = self._speeds[session.worker_id] = WorkerThroughput()
        return speed

    def speed(self, session: WorkerSession) -> tuple[WorkerThroughput | None, float]:
        """The worker's learnt speed, if any, and the mean context of its rollouts."""
        return self._speeds.get(session.worker_id), self._contexts.get(session.session_id, 0.0)

    def due(self, now: float) -> bool:
        """Whether it is time for the next round; if so, `learn` comes first."""
        if now < self._next:
            return False
        self._blind = now - self._next > _BLIND_S
        self._next = now + _EVERY_S
        return True

    def learn(self, now: float) -> Iterator[None]:
        """Learn from the heartbeats, some workers or one kind of them in each step, so that others have their turn in
        between.
        """
        sessions = list(self._state.sessions.values())
        for at in range(0, len(sessions), _PART):
            self._observe_all(sessions[at : at + _PART], now)
            yield
        self._begin_round(now)
        self.lesson += yield from self._fleet.fit(self._state.sessions.values(), self._speeds, self._contexts, now)

    def _observe_all(self, sessions: Sequence[WorkerSession], now: float) -> None:
        for session in sessions:
            self._observe(session, disturbed=self._blind or self._disturbed(session, now))

    def _begin_round(self, now: float) -> None:
        """Drop what is over: workers that left, requests that were not followed."""
        sessions = self._state.sessions
        for gone in self._beats.keys() - sessions.keys():
            del self._beats[gone]
            self._contexts.pop(gone, None)
        self._forget(now)
        self._searches = {run_id: one for run_id, one in self._searches.items() if run_id in self._state.runs}
        for key, asked in list(self._asked.items()):
            self._expire(key, asked, now)

    def _forget(self, now: float) -> None:
        """Drop the speeds of workers that left long ago: new machines have new names."""
        self._seen.update((session.worker_id, now) for session in self._state.sessions.values())
        for worker_id, seen in list(self._seen.items()):
            if now - seen > _REMEMBERED_S:
                del self._seen[worker_id]
                self._speeds.pop(worker_id, None)

    def _disturbed(self, session: WorkerSession, now: float) -> bool:
        """Whether the worker is held up now: it is held, installs, or waits for the store."""
        run = self._state.runs.get(session.run_id)
        waits = run is not None and not run.mirror.reconciled.is_set()
        stored_late = session.append_stream.storing > 0 and now - session.append_stream.progressed > _STORING_S
        return session.beat.held or session.state is WorkerState.INSTALLING or waits or stored_late

    def _observe(self, session: WorkerSession, *, disturbed: bool) -> None:
        """Learn a worker's speed from two heartbeats, if it only generated between them."""
        last, beat = self._beats.get(session.session_id), session.beat
        if last is not None:
            last.disturbed |= disturbed
            if beat is last.beat or beat is last.latest:
                return
        running, reading = frozenset(session.attempts.keys() - session.pending.keys()), bool(session.pending)
        context = self._contexts[session.session_id] = _context(session)
        session.learn_plateau(session.plateau)  # its rate may be another with this context
        under_way = reading and last is not None and not (last.reading or last.disturbed) and self.knows(session)
        if under_way and last is not None and beat.uptime_s - last.beat.uptime_s <= _LONGEST_S:
            last.latest = beat  # what is read counts once it has been read
            return
        self._beats[session.session_id] = _Beat(beat, running, reading, disturbed)
        if last is None or last.disturbed or not running or not last.running:
            return
        seconds, busy_s = beat.uptime_s - last.beat.uptime_s, beat.busy_s - last.beat.busy_s
        tokens = beat.tokens_generated - last.beat.tokens_generated
        churn = len(running ^ last.running) + len(session.pending)
        steady = busy_s >= 0.9 * seconds and beat.quiet_s <= _QUIET * seconds
        if not 0 < seconds <= _LONGEST_S or churn > _CHURN * len(running) or not steady:
            return
        speed, load = self._speed_of(session), (len(running) + len(last.running)) / 2
        # Steps that read prompts make a token of each rollout, too, but take as long as the reading. Where that cannot
        # be told apart, the worker counts as slower than it is, unless something better is known.
        reads, read_s = beat.prompt_reads - last.beat.prompt_reads, beat.prompt_s - last.beat.prompt_s
        if reads < 0 or read_s < 0.0:
            return
        if reading or last.reading or read_s > _READING * seconds:
            if self._fleet.curve(session) is not None:
                return
            reads, read_s = 0, 0.0
        unknown = not speed.span[1]
        speed.observe(load, context, tokens - round(reads * load), seconds - read_s)
        if unknown and speed.span[1]:
            self._fleet.note_first()
        session.learn_plateau(speed.plateau(context))
        session.learn_rate(speed.rate(len(running) + 1, context))

    def _expire(self, key: tuple[str, str], asked: _Asked, now: float) -> None:
        attempt = asked.attempt
        run = self._state.runs.get(attempt.run_id)
        rollout_id = attempt.rollout.rollout_id
        there = run is not None and (rollout_id in run.running or rollout_id in run.queue)
        followed = there and (attempt.session is None or asked.here)  # else the request is lost
        if not followed or now - asked.when > asked.stays_s:
            del self._asked[key]
            if followed and asked.promise is not None:
                self._judge(asked, asked.promise)
            if attempt.session is not None:
                attempt.give_up_move()
        elif asked.here and attempt.target and now - asked.when > _HANDOVER_S:
            log.info("move given up", run_id=attempt.run_id, rollout_id=attempt.rollout.rollout_id)
            attempt.give_up_move()

    def _judge(self, asked: _Asked, promise: MovePromise) -> None:
        """Compare what a rollout that moved should have made with what it made, if it still runs where it went."""
        run = self._state.runs.get(asked.attempt.run_id)
        moved = run.running.get(asked.attempt.rollout.rollout_id) if run is not None else None
        session = moved.session if moved is not None else None
        if run is not None and moved is not None and session is not None and session.session_id == asked.target:
            run.moves.judge(promise.tokens, moved.stored - asked.stored)

    def decide(
        self, run: RunState, workers: Sequence[tuple[WorkerSession, WorkerView]], now: float, *, reserved_slots: int = 0
    ) -> None:
        """Ask for rollouts whose step ends sooner if they go on elsewhere. Call when nothing queued could take the free
        slots now; `reserved_slots` of them are left free for interactive rollouts.

        Workers of reclaimed hosts are left out: `BorrowedHosts` takes from them.
        """
        workers = [(session, worker) for session, worker in workers if not session.reclaimed]
        if borrowable(run) <= self._lending(run):
            workers = [(one, replace(worker, shut=True) if worker.borrowed else worker) for one, worker in workers]
        if not self._on or len(workers) < 2 or all(worker.running >= worker.slots for _, worker in workers):
            return
        running, pending = Counter[str](), Counter[str]()  # changes once the requested moves are done
        arriving: dict[str, list[RunningRollout]] = defaultdict(list)
        for asked in self._asked.values():
            if asked.here and asked.attempt.target:
                running[asked.source] -= 1
                running[asked.target] += 1
                pending[asked.source] -= not asked.attempt.started
                pending[asked.target] += not asked.attempt.started
                arriving[asked.target].append(_shown(asked.attempt, asked.when, started=False, stays=True))
        engines = [
            self._engine(
                session,
                worker,
                running[session.session_id],
                pending[session.session_id],
                arriving.get(session.session_id, ()),
                now,
            )
            for session, worker in workers
        ]
        sessions = {worker.session_id: session for session, worker in workers if not session.gone}
        full = _queue_fills(run, workers, reserved_slots)
        search = self._searches.setdefault(run.run_id, MoveSearch())
        moves = rebalance(
            engines,
            run.lengths.curve,
            now=now,
            running=0 if full else run.moves.allows(now, running=len(run.running)),
            search=search,
            lesson=self.lesson,
        )
        self._ask(run, moves, sessions, now)

    def _engine(
        self,
        session: WorkerSession,
        worker: WorkerView,
        running: int,
        pending: int,
        arriving: Sequence[RunningRollout],
        now: float,
    ) -> EngineLoad:
        if running or pending:
            running, pending = max(0, worker.running + running), max(0, worker.pending + pending)
            worker = replace(worker, running=running, pending=pending)
        curve = self._fleet.curve(session)
        return EngineLoad(
            worker=worker,
            speed=curve or _UNKNOWN,
            seen_from=curve.loads[0] if curve is not None else 0.0,
            context=self._contexts.get(session.session_id, 0.0),
            quiet_s=session.beat.quiet_s,
            rollouts=lambda: self._movable(session, now),
            arriving=arriving,
        )

    def _movable(self, session: WorkerSession, now: float) -> Iterator[RunningRollout]:
        for attempt in session.attempts.values():
            if not attempt.target and not attempt.leaving and attempt.attempt_id not in session.freed:
                since = attempt.given if attempt.started else max(attempt.given, session.turned)
                asked = self._asked.get((attempt.run_id, attempt.rollout.rollout_id))
                stays = asked is not None and (attempt.started or now - asked.when <= _AGAIN_S)
                yield _shown(attempt, since, started=attempt.started, stays=stays, cached=attempt.cached)

    def _ask(
        self, run: RunState, moves: Sequence[RolloutMove], sessions: Mapping[str, WorkerSession], now: float
    ) -> None:
        if not moves:
            return
        batches: dict[str, list[AttemptRef]] = {}
        room = borrowable(run) - self._lending(run)
        started = 0
        for move in moves:
            source, target = sessions.get(move.source), sessions.get(move.target)
            attempt = source.attempts.get(move.attempt_id) if source else None
            if source is None or target is None or attempt is None:
                continue  # it has left meanwhile
            if target.borrowed and not source.borrowed:
                if room <= 0:
                    continue
                room -= 1
            attempt.move_to(target.worker_id)
            started += attempt.started
            stays_s = max(_AGAIN_S, move.promise.after_s) if move.promise is not None else _AGAIN_S
            asked = _Asked(attempt, move.source, move.target, now, stays_s, attempt.stored, move.promise)
            self._asked[attempt.run_id, attempt.rollout.rollout_id] = asked
            batches.setdefault(move.source, []).append(attempt.ref)
            log.info(
                "moves",
                run_id=run.run_id,
                rollout_id=attempt.rollout.rollout_id,
                source=source.worker_id,
                target=target.worker_id,
                gain_s=round(move.gain_s, 1),
            )
        for source_id, refs in batches.items():
            sessions[source_id].outbox.request_release(refs)
        if started:
            run.moves.asked(started, now)

    def _lending(self, run: RunState) -> int:
        """Rollouts of the run on their way from other workers to borrowed ones."""
        sessions = self._state.sessions

        def borrowed(session_id: str) -> bool:
            return session_id in sessions and sessions[session_id].borrowed

        return sum(
            key[0] == run.run_id
            and bool(asked.attempt.target)
            and asked.here
            and borrowed(asked.target)
            and not borrowed(asked.source)
            for key, asked in self._asked.items()
        )


def borrowable(run: RunState) -> float:
    """How many more of the run's rollouts may go to borrowed workers."""
    most = run.spec.borrow.max_rollouts
    if most is None:
        return inf
    there = sum(one.session is not None and one.session.borrowed for one in run.running.values())
    return most - there


def _shown(attempt: RunningAttempt, since: float, *, started: bool, stays: bool, cached: int = 0) -> RunningRollout:
    return RunningRollout(
        attempt_id=attempt.attempt_id,
        rollout=attempt.rollout,
        length=attempt.length,
        made=attempt.stored,
        budget=attempt.max_tokens - attempt.stored,
        since=since,
        started=started,
        cached=cached,
        stays=stays,
        attempts=max(1, attempt.number),
    )


def _queue_fills(run: RunState, workers: Sequence[tuple[WorkerSession, WorkerView]], reserved_slots: int) -> bool:
    """Whether free slots are for what is queued, though workers get it little by little: no running rollout moves."""
    free = [worker for _, worker in workers if worker.running < worker.slots and not (worker.held or worker.shut)]
    if sum(worker.slots - worker.running for worker in free) <= reserved_slots:
        return False
    return any(may_take(one, worker) for one, _ in zip(run.queue, range(_LOOKED_AT), strict=False) for worker in free)


def _context(session: WorkerSession) -> float:
    """Mean tokens of prompt and response of the worker's rollouts."""
    tokens = sum(one.rollout.length + one.stored - one.start for one in session.attempts.values())
    return tokens / max(1, len(session.attempts))


#: After so long without the attempt it is asked for again.
_REMIND_S: Final = 15.0


def free(session: WorkerSession, attempts: Iterable[RunningAttempt], reason: ReleaseReason, now: float) -> None:
    """Ask the worker for these attempts, unless it was asked already.

    Invariant: an attempt is asked back on account of its worker once (`WorkerSession.freed`), and again only if it is
    not handed back for long. A worker that still keeps it is given up (`WorkerHealth`).
    """
    refs = [
        one.ref
        for one in attempts
        if not one.leaving and not one.target and one.session is session and one.attempt_id not in session.freed
    ]
    if refs and not session.gone:
        _ask(session, refs, reason, now)


def remind(session: WorkerSession, now: float) -> None:
    """Ask again for what the worker still has long after the request."""
    if not session.freed:
        return
    late: dict[ReleaseReason, list[AttemptRef]] = {}
    for name, freed in session.freed.items():
        if now - freed.last >= _REMIND_S:
            late.setdefault(freed.reason, []).append(session.attempts[name].ref)
    for reason, refs in late.items():
        _ask(session, refs, reason, now)


def _ask(session: WorkerSession, refs: Sequence[AttemptRef], reason: ReleaseReason, now: float) -> None:
    session.free(refs, reason, now)
    log.info("freed", worker_id=session.worker_id, rollouts=len(refs), reason=reason.value)
