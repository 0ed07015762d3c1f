"""Decides what each worker serves, installs and generates: shows the state to the rules in `scheduling`, in order.

The coordinator and a simulator call the same rounds. A round has no clock, no store and no event loop: it changes the
model where a decision is a message to a worker, and yields what needs the store. For example, with a store in memory:

    for deed in rounds.turns(now):
        match deed:
            case SlotFill():
                while deed.due(now) and (placements := deed.place(now)):
                    for one in placements:
                        session, queued = state.sessions[one.worker_id], deed.run.take_queued(one.rollout_id)
                        deed.run.start(started(deed.run, queued, ..., now=now), session)
                    deed.note_turn(0.0, now)

The next round begins `gather_s` after a change, or after `pause_s`; at once if that is 0.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar, Final

from ebbtide.coordinator.dispatcher.borrowed_hosts import BorrowedHosts
from ebbtide.coordinator.dispatcher.forecast_sender import ForecastSender
from ebbtide.coordinator.dispatcher.host_views import HostViews
from ebbtide.coordinator.dispatcher.install_sender import InstallSender
from ebbtide.coordinator.dispatcher.loss_watch import LossWatch
from ebbtide.coordinator.dispatcher.memory_offers import MemoryOffers
from ebbtide.coordinator.dispatcher.prefill_speeds import PrefillSpeeds
from ebbtide.coordinator.dispatcher.rebalancer import Rebalancer
from ebbtide.coordinator.dispatcher.round_deeds import Deed, SlotFill
from ebbtide.coordinator.dispatcher.unserved_work import UnservedWork
from ebbtide.coordinator.dispatcher.worker_allocator import WorkerAllocator
from ebbtide.coordinator.fleet.engine_changes import EngineChanges
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import RunEvents
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.round_pacing import RoundPacing
from ebbtide.scheduling.dispatch.start_pacing import StartPacing
from ebbtide.scheduling.dispatch.throughput import WorkerThroughput
from ebbtide.scheduling.health.overload import Work

#: Of a mirror that was read again, so many pages are taken in a round.
_PAGES: Final = 16


class DispatchRound:
    """`public_key`: of a run's publisher, for its installs; `slice_s`, `balance`, `interactive_slots`: `slice_s`,
    `rebalance` and `interactive_slots` of the coordinator's settings.
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
        slice_s: float,
        balance: bool = True,
        interactive_slots: int = 0,
    ) -> None:
        self._state = state
        self._moves = Rebalancer(state, on=balance)
        self._prefills = PrefillSpeeds()
        self._borrowed = BorrowedHosts(state, self._moves, self._prefills, run_events)
        changes = EngineChanges(state)
        self._allocator = WorkerAllocator(
            state, trust, self._moves, changes, self._prefills, run_events, slice_s=slice_s
        )
        self._losses, self._memory = LossWatch(), MemoryOffers(state)
        self._hosts = HostViews(state, trust, self._moves, self._prefills, self._losses.spell_s)
        self._installs = InstallSender(state, changes, public_key)
        self._forecasts = ForecastSender(state)
        self._unserved = UnservedWork(state, trust, changes, run_events)
        self._pacing, self._starts = RoundPacing(), StartPacing()
        self._interactive_slots = interactive_slots
        self._kept: dict[str, int] = {}
        self._reading = False  # some run's mirror was read again, and is still being taken
        self._last_started = ""  # the run that got the last rollouts before starts were held

    @property
    def kept_slots(self) -> int:
        """Slots that the last round left free for interactive rollouts, of all runs."""
        return sum(self._kept.values())

    def speed(self, session: WorkerSession) -> tuple[WorkerThroughput | None, float]:
        """A worker's learnt speed, if any, and the mean context of its rollouts."""
        return self._moves.speed(session)

    def pause_s(self, now: float) -> float:
        """Seconds until the next round if nothing changes; 0.0: it is to begin at once, and to gather no changes."""
        return 0.0 if self._reading else self._pacing.pause_s(self._starts.held_s(now))

    def turns(self, now: float) -> Iterator[Deed]:
        """One round, begun now: allot workers, send versions, fill free slots, move rollouts. The caller does each deed
        before it goes on. A round that is not run to its end is left as it is; the next one makes up for it.
        """
        self._kept.clear()
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
            self._losses.look(self._state.sessions.values(), now)
            yield from self._memory.update(now)
            self._borrowed.judge(now)
            yield from self._allocator.hand_over(now)
            yield None  # in a large fleet each of these takes a while: others have their turn
        for run in self._in_turn(now):
            yield from self._serve(run, now, balance=balance)

    def _serve(self, run: RunState, now: float, *, balance: bool) -> Iterator[Deed]:
        """A run's part of the round."""
        heard = self._forecasts.heard
        pages = 0
        while not (run.stale or run.ended or self._state.sheds(Work.FORECASTS)) and run.foresee(now, heard=heard):
            yield None
            pages += 1
            if pages == _PAGES:  # other runs are served meanwhile, and the lease is renewed
                self._reading = True
                return
        fill = self.fill_class(
            run, self._state, self._hosts, self._starts, now, interactive_slots=self._interactive_slots
        )
        if fill.due(now):
            self._unserved.note_context(run)  # a longer one may have come since, and with it what needs it
            yield fill
        self._kept[run.run_id] = fill.kept
        if fill.slowed:
            self._last_started = run.run_id
        if balance and not run.stale and not run.ended:  # what is still queued fits nowhere, or waits for others
            hosts = self._hosts.of(run, now)
            self._borrowed.release(run, hosts, now)
            if not fill.held and not self._state.sheds(Work.MOVES):  # free slots are for what is queued
                self._moves.decide(run, hosts, now, kept_slots=fill.kept)
            yield None

    def _in_turn(self, now: float) -> list[RunState]:
        """The runs, from the one after that which got the last rollouts before starts were held."""
        runs = self._state.at_work(now)
        first = next((i + 1 for i, run in enumerate(runs) if run.run_id == self._last_started), 0)
        return runs[first:] + runs[:first]

    def _arrange(self, now: float) -> Iterator[Deed]:
        """Allot workers and send versions; end rollouts and runs that no worker can serve."""
        self._allocator.decide(now)
        yield None
        measure = self._pacing.measures(now)
        for run in self._state.at_work(now):
            self._installs.send(run, now)
            if not run.stale:  # who reads it has its lock
                yield from self._unserved.deeds(run, now, measure=measure)
            self._unserved.warn_if_lacking(run, now, measure=measure)
            yield None
        self._unserved.forget_ended()
