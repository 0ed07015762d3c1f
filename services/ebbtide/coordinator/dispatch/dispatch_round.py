"""Decides what each worker serves, installs and generates: shows the state to the rules, in order.

The coordinator and a simulator call the same rounds. A round has no clock, no store and no event loop: it changes the
state where a decision is a message to a worker, and yields what needs the store. For example, with a store in memory:

    for action in rounds.steps(now):
        match action:
            case SlotFill():
                while action.due(now) and (placements := action.place(now)):
                    for one in placements:
                        session, queued = state.sessions[one.session_id], action.run.take_queued(one.rollout_id)
                        action.run.start(started(action.run, queued, ..., now=now), session)
                    action.note_turn(0.0, now)

The next round begins `gather_s` after a change, or after `pause_s`; at once if that is 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple, TypeAlias

from ebbtide.coordinator.dispatch.borrowed_hosts import BorrowedHosts
from ebbtide.coordinator.dispatch.capacity import SlotLimits
from ebbtide.coordinator.dispatch.installs import EngineChanges, InstallSender
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer, borrowable
from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters, RunFailure, UnservedWork
from ebbtide.coordinator.dispatch.worker_allocator import WorkerAllocator
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.rules.placement import Placement, place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import AttemptForecast, RunningAttempt
from ebbtide.coordinator.state.worker_messages import Forecast, Forecasts
from ebbtide.coordinator.state.worker_session import WorkerSession

#: Pause after the first change, so that a burst is decided in one round. A round looks at all workers: with more than
#: `_GATHER_FLEET` of them it is longer in proportion, up to `_GATHER_MOST_S`.
_GATHER_S: Final = 0.01
_GATHER_FLEET: Final = 64
_GATHER_MOST_S: Final = 0.1
#: Longest pause between rounds, because some decisions depend on time alone.
TICK_S: Final = 0.25
#: Least time between two looks at workers' runs and versions: filling slots is more urgent.
_ARRANGE_S: Final = 0.05
#: How often the queue is searched for rollouts that no worker's context has room for.
_MEASURE_EVERY_S: Final = 1.0


def gather_s(workers: int) -> float:
    """How long changes are gathered before a round."""
    return min(_GATHER_MOST_S, _GATHER_S * max(1.0, workers / _GATHER_FLEET))


class RoundPacing:
    def __init__(self) -> None:
        self._arranged = self._measured = -math.inf
        self._unarranged = False

    def arranges(self, now: float) -> bool:
        """Whether the round that begins now looks at workers' runs and versions; else the next one comes soon."""
        due = self._arranged + _ARRANGE_S <= now
        self._unarranged = not due
        if due:
            self._arranged = now
        return due

    def measures(self, now: float) -> bool:
        """Whether the round that begins now searches the queues for rollouts that are too long."""
        due = now - self._measured >= _MEASURE_EVERY_S
        if due:
            self._measured = now
        return due

    def pause_s(self, held_s: float) -> float:
        """Seconds until the next round if nothing changes. `held_s`: see `StartPacing.held_s`."""
        pause = _ARRANGE_S if self._unarranged else TICK_S
        return min(pause, held_s) if held_s else pause


#: A turn of the event loop that takes longer shows that the coordinator is behind.
_BEHIND_S: Final = 0.05
_TURNS: Final = 3.0
_LONGEST_S: Final = 1.0


class StartPacing:
    """Decides whether rollouts may start while the coordinator is behind with what workers send.

    Rollouts that start make workers send more. So after a slow turn of the event loop none starts for some such turns.
    At least one batch starts in each `_LONGEST_S`.
    """

    def __init__(self) -> None:
        self._held_until = -math.inf

    def held_s(self, now: float) -> float:
        """For how many seconds no rollout may start; 0: one may."""
        return max(0.0, self._held_until - now)

    def note_turn(self, turn_s: float, now: float) -> bool:
        """Note how long the event loop's turn took after a batch of starts. Whether none may start now."""
        if turn_s > _BEHIND_S:
            self._held_until = now + min(_LONGEST_S, _TURNS * turn_s)
        return self.held_s(now) > 0.0


#: A person reads an answer, and asks again within about so long.
ASKED_LATELY_S: Final = 120.0
#: At most one in so many slots is reserved. Fleets with fewer slots reserve none.
_ONE_IN: Final = 8


def reserved_slots(total: int, running: int, *, most: int, asked_s: float) -> int:
    """Slots that batch rollouts leave free. `total`: slots of the run's workers; `running`: interactive rollouts in
    them, which have their slots already; `asked_s`: seconds since an interactive rollout was queued.

    Where all slots are full of batch rollouts, a person waits until one of these ends. A reserved slot takes that
    wait away. It costs throughput, so slots are reserved only while people ask, and only a small part of all.
    """
    if asked_s > ASKED_LATELY_S:
        return 0
    return max(0, min(most, total // _ONE_IN) - running)


#: Views kept beyond the attached sessions, before those of sessions that are over are dropped.
_SPARE: Final = 64


class _Seen(NamedTuple):
    revision: int
    lesson: int  # -1: the speeds of others do not matter
    view: WorkerView | None  # None: it has no version of the run that it serves, or may get nothing


class WorkerViews:
    """Shows workers to the decisions, as views of their sessions.

    Invariant: a session's view is that of its present `revision`; with free slots and a typical worker's rate for its
    own, that of the last lesson on speeds, too. Lost with the process, and made again.
    """

    def __init__(
        self,
        state: CoordinatorState,
        trust: WorkerTrust,
        moves: Rebalancer,
        prefills: PrefillSpeeds,
    ) -> None:
        self._state, self._trust, self._moves, self._prefills = state, trust, moves, prefills
        self._seen: dict[str, _Seen] = {}

    def of(self, run: RunState, now: float) -> list[tuple[WorkerSession, WorkerView]]:
        """The workers that have a version of the run and may get its rollouts, full ones too."""
        steady_only = run.spec.borrow.max_rollouts == 0
        quarantined = self._trust.quarantined(now)
        lesson, seen = self._moves.lesson, self._seen
        found: list[tuple[WorkerSession, WorkerView]] = []
        for session in self._state.serving(run.run_id):
            known = seen.get(session.session_id)
            if known is None or known.revision != session.revision or known.lesson not in {lesson, -1}:
                known = self._look(run, session)
            if known.view is None or (steady_only and session.borrowed) or session.worker_id in quarantined:
                continue
            found.append((session, known.view))
        return found

    def coming(self, run: RunState, now: float) -> list[WorkerView]:
        """Workers that get a version soon, as full ones: for rollouts that avoid all others. Call `of` first."""
        steady_only = run.spec.borrow.max_rollouts == 0
        unready = [one for one in self._state.serving(run.run_id) if self._seen[one.session_id].view is None]
        return [
            WorkerView(
                session_id=session.session_id,
                worker_id=session.worker_id,
                slots=1,
                running=1,
                installed=run.versions.newest,
                target=run.versions.newest,
                max_model_len=session.hello.engine.max_model_len,
                scores=session.scores_prompts,
                min_p=session.samples_min_p,
            )
            for session in unready
            if not _ready(run, session)
            and self._trust.trusts(session, now)
            and not (steady_only and session.borrowed)
            and session.unfit.get(run.run_id, 0.0) <= now
        ]

    def _look(self, run: RunState, session: WorkerSession) -> _Seen:
        if len(self._seen) > 2 * len(self._state.sessions) + _SPARE:
            self._seen = {name: one for name, one in self._seen.items() if name in self._state.sessions}
        serves = _ready(run, session) and not session.draining and not session.given_up
        view = self._view(run, session) if serves else None
        alone = view is None or view.running >= view.slots or self._moves.knows(session)
        seen = self._seen[session.session_id] = _Seen(session.revision, -1 if alone else self._moves.lesson, view)
        return seen

    def _view(self, run: RunState, session: WorkerSession) -> WorkerView:
        pending, running, slots = len(session.pending), len(session.attempts), session.slots
        said = session.beat.borrowed if session.borrowed else None
        return WorkerView(
            session_id=session.session_id,
            worker_id=session.worker_id,
            slots=slots,
            running=running,
            pending=pending,
            unread=sum(one.length - one.cached for one in session.pending.values()) if pending else 0,
            probation=sum(one.rollout.no_progress > 0 for one in session.pending.values()) if pending else 0,
            rate=self._moves.rate(session) if running < slots else 0.0,
            plateau=session.plateau,
            prefill=self._prefills.rate(session),
            held=session.beat.held,
            installed=session.version_of(run.run_id),
            target=session.target[1] if session.target else 0,
            max_model_len=session.hello.engine.max_model_len,
            shut=session.reclaimed or (said is not None and said.asleep),
            borrowed=session.borrowed,
            share=said.share if said else 1.0,
            spell_s=said.spell_s if said else math.inf,
            scores=session.scores_prompts,
            min_p=session.samples_min_p,
        )


def _ready(run: RunState, session: WorkerSession) -> bool:
    return session.target is not None and session.target[0] == run.run_id and session.version_of(run.run_id) > 0


#: Rollouts placed by one store call: their prompts and partials come back in its reply.
_PLACE_AT_ONCE: Final = 128


class SlotFill:
    """Gives a run's queued rollouts to its workers' free slots, batch by batch.

    While `due`, the caller takes the run's lock, calls `place`, and starts what that returns; nothing ends the action.
    Then it tells by `note_turn` how long others had their turn.
    """

    def __init__(
        self,
        run: RunState,
        state: CoordinatorState,
        views: WorkerViews,
        starts: StartPacing,
        now: float,
        *,
        interactive_slots: int = 0,
    ) -> None:
        """`interactive_slots`: see the settings."""
        self.run: Final = run
        self._state, self._views, self._starts = state, views, starts
        self._now = now
        self._interactive_slots = interactive_slots
        self.reserved = 0  # slots that the last batch left free for interactive rollouts
        self.slowed = False  # the last batch made the caller hold starts

    @property
    def held(self) -> bool:
        """Whether no rollout may start now: the caller is behind with what workers send."""
        return self._starts.held_s(self._now) > 0.0

    def due(self, now: float) -> bool:
        """Whether there may be something to place."""
        self._now, run = now, self.run
        return bool(run.queue) and not run.mirror.stale and self._state.has_room(run.run_id) and not self.held

    def place(self, now: float) -> list[Placement]:
        """The next batch; empty if nothing fits. Call with the run's lock held: workers may leave meanwhile."""
        self._now, run = now, self.run
        served = self._views.of(run, now)
        workers = [worker for _, worker in served]
        if all(worker.running >= worker.slots for worker in workers):
            return []
        return place(
            run.queue,
            workers + self._views.coming(run, now),
            run.episodes.prefixes,
            at_most=_PLACE_AT_ONCE,
            rest=self._rest,
            borrowable=borrowable(run),
            batch_slots=self._batch_slots(served),
            now=now,
            siblings=run.siblings,
        )

    def _rest(self, one: QueuedRollout) -> float:
        """Tokens that a rollout will probably still make: its budget or the run's context ends it."""
        rest = self.run.lengths.rest(one, one.made, one.budget or None)
        return min(rest, max(0, context - one.length)) if (context := self.run.context) else rest

    def _batch_slots(self, served: Sequence[tuple[WorkerSession, WorkerView]]) -> float:
        """Most placements of batch rollouts: the reserved slots stay free."""
        running = sum(session.interactive for session, _ in served)
        total = sum(worker.slots for _, worker in served)
        asked_s = self._now - self.run.asked_at
        self.reserved = reserved_slots(total, running, most=self._interactive_slots, asked_s=asked_s)
        if not self.reserved:
            return math.inf
        return sum(max(0, worker.slots - worker.running) for _, worker in served if not worker.shut) - self.reserved

    def note_turn(self, turn_s: float, now: float) -> None:
        """Note how long others had their turn after a batch."""
        self._now = now
        self.slowed = self._starts.note_turn(turn_s, now)


#: A worker is told so often, at most.
_TELL_EVERY_S: Final = 1.0
#: Sessions in one round: with 64 rollouts each they take some two milliseconds.
_TOLD_AT_ONCE: Final = 16
CAPABILITY: Final = "forecasts"


class ForecastSender:
    """Tells workers what their rollouts have still to come, once that has changed much since they were told.

    Only workers with the capability `forecasts` hear of it, each once a second at most. In a large fleet some have
    their turn in each round.

    Invariant: `_looked` has when each session had its turn. Lost with the process: assignments and attachments tell
    anew.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._looked: dict[str, float] = {}
        self._turns: Iterator[str] = iter(())
        self.heard = False  # some worker listens, as of the last turn

    def send(self, now: float) -> None:
        """Tell the next workers what has changed."""
        for _ in range(min(_TOLD_AT_ONCE, len(self._state.sessions))):
            session_id = next(self._turns, "")
            if not session_id:
                listening = [one.session_id for one in self._state.sessions.values() if _listens(one)]
                self._turns, self.heard = iter(listening), bool(listening)
                self._looked = {name: at for name, at in self._looked.items() if name in self._state.sessions}
                return
            session = self._state.sessions.get(session_id)
            if session is not None and now - self._looked.get(session_id, -_TELL_EVERY_S) >= _TELL_EVERY_S:
                self._looked[session_id] = now
                if changed := [_forecast(one, news) for one in session.attempts.values() if (news := one.news())]:
                    session.outbox.send(Forecasts(tuple(changed)))


def _listens(session: WorkerSession) -> bool:
    return CAPABILITY in session.hello.capabilities and not session.gone


def _forecast(attempt: RunningAttempt, news: AttemptForecast) -> Forecast:
    return Forecast(attempt.attempt_id, news.expected_tokens, news.longest_tokens, news.stored)


#: None: others should have their turn.
Action: TypeAlias = SlotFill | DeadLetters | RunFailure | None


#: Of a mirror that was read again, so many pages are taken in a round.
_PAGES: Final = 16


class DispatchRound:
    """`public_key`: of a run's publisher, for its installs; `timeslice_s`, `balance`, `interactive_slots`:
    `timeslice_s`, `rebalance` and `interactive_slots` of the coordinator's settings.
    """

    #: What gives a run's rollouts to its workers.
    fill_class: ClassVar[type[SlotFill]] = SlotFill

    def __init__(
        self,
        state: CoordinatorState,
        trust: WorkerTrust,
        public_key: Callable[[str], bytes],
        run_events: RunEvents,
        *,
        timeslice_s: float,
        balance: bool = True,
        interactive_slots: int = 0,
    ) -> None:
        self._state = state
        self._moves = Rebalancer(state, on=balance)
        self._prefills = PrefillSpeeds()
        self._borrowed = BorrowedHosts(state, self._moves, self._prefills, run_events)
        changes = EngineChanges(state)
        self._allocator = WorkerAllocator(
            state, trust, self._moves, changes, self._prefills, run_events, timeslice_s=timeslice_s
        )
        self._memory = SlotLimits(state)
        self._views = WorkerViews(state, trust, self._moves, self._prefills)
        self._installs = InstallSender(state, changes, public_key)
        self._forecasts = ForecastSender(state)
        self._unserved = UnservedWork(state, trust, changes, run_events)
        self._pacing, self._starts = RoundPacing(), StartPacing()
        self._interactive_slots = interactive_slots
        self._reserved: dict[str, int] = {}
        self._reading = False  # some run's mirror was read again, and is still being taken
        self._last_started = ""  # the run that got the last rollouts before starts were held

    @property
    def reserved_slots(self) -> int:
        """Slots that the last round left free for interactive rollouts, of all runs."""
        return sum(self._reserved.values())

    def speed(self, session: WorkerSession) -> tuple[WorkerThroughput | None, float]:
        """A worker's learnt speed, if any, and the mean context of its rollouts."""
        return self._moves.speed(session)

    def pause_s(self, now: float) -> float:
        """Seconds until the next round if nothing changes; 0.0: it is to begin at once, and to gather no changes."""
        return 0.0 if self._reading else self._pacing.pause_s(self._starts.held_s(now))

    def steps(self, now: float) -> Iterator[Action]:
        """One round, begun now: allot workers, send versions, fill free slots, move rollouts. The caller does each
        action before it goes on. A round that is not run to its end is left as it is; the next one makes up for it.
        """
        self._reserved.clear()
        self._reading = False
        if self._pacing.arranges(now):
            yield from self._arrange(now)
        if not self._state.sheds(Work.FORECASTS):
            self._forecasts.send(now)
        balance = self._moves.due(now)
        if balance:
            yield None
            self._prefills.learn(self._state.sessions.values())
            yield from self._moves.learn(now)
            yield from self._memory.update(now)
            self._borrowed.judge(now)
            yield from self._allocator.hand_over(now)
            yield None  # in a large fleet each of these takes a while: others have their turn
        for run in self._in_turn(now):
            yield from self._serve(run, now, balance=balance)

    def _serve(self, run: RunState, now: float, *, balance: bool) -> Iterator[Action]:
        """A run's part of the round."""
        heard = self._forecasts.heard
        pages = 0
        while not (run.mirror.stale or run.ended or self._state.sheds(Work.FORECASTS)) and run.foresee(
            now, heard=heard
        ):
            yield None
            pages += 1
            if pages == _PAGES:  # other runs are served meanwhile, and the lease is renewed
                self._reading = True
                return
        fill = self.fill_class(
            run, self._state, self._views, self._starts, now, interactive_slots=self._interactive_slots
        )
        if fill.due(now):
            self._unserved.note_context(run)  # a longer one may have come since, and with it what needs it
            yield fill
        self._reserved[run.run_id] = fill.reserved
        if fill.slowed:
            self._last_started = run.run_id
        if balance and not run.mirror.stale and not run.ended:  # what is still queued fits nowhere, or waits for others
            workers = self._views.of(run, now)
            self._borrowed.release(run, workers, now)
            if not fill.held and not self._state.sheds(Work.MOVES):  # free slots are for what is queued
                self._moves.decide(run, workers, now, reserved_slots=fill.reserved)
            yield None

    def _in_turn(self, now: float) -> list[RunState]:
        """The runs, from the one after that which got the last rollouts before starts were held."""
        runs = self._state.at_work(now)
        first = next((i + 1 for i, run in enumerate(runs) if run.run_id == self._last_started), 0)
        return runs[first:] + runs[:first]

    def _arrange(self, now: float) -> Iterator[Action]:
        """Allot workers and send versions; end rollouts and runs that no worker can serve."""
        self._allocator.decide(now)
        yield None
        measure = self._pacing.measures(now)
        for run in self._state.at_work(now):
            self._installs.send(run, now)
            if not run.mirror.stale:  # who reads it has its lock
                yield from self._unserved.actions(run, now, measure=measure)
            self._unserved.warn_if_lacking(run, now, measure=measure)
            yield None
        self._unserved.forget_ended()
