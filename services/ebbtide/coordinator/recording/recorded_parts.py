"""Chooses the parts that decide: recorded ones if `record_decisions` is set, else plain ones, which cost no more."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ebbtide.coordinator.dispatcher.dispatch_round import DispatchRound
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.recording.decision_journal import DecisionJournal
from ebbtide.coordinator.recording.recorded_round import RecordedRounds
from ebbtide.coordinator.recording.recorded_state import RecordedState
from ebbtide.coordinator.recording.recorded_workers import RecordedTrust
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import RunEvents
from ebbtide.scheduling.long_tail.length_learner import LengthLesson
from ebbtide.scheduling.long_tail.outlook.run_forecasts import MadeLesson, make_now


def make_in_thread(make: Callable[[], LengthLesson]) -> MadeLesson:
    """Makes a lesson beside the event loop: it takes some tenths of a second."""
    return asyncio.get_running_loop().run_in_executor(None, make)


class DecidingParts:
    """The state, the trust in workers and the rounds of one coordinator, or of a simulated one."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] | None = None) -> None:
        """`clock`: see `CoordinatorState`; None: of a live coordinator. That learns lengths in a thread, unless its
        decisions are recorded: a replay knows no threads. Raises `InvalidRequest` if `record_decisions` cannot be
        written.
        """
        self._settings = settings
        path, most = settings.record_decisions, settings.record_decisions_bytes
        self._journal = DecisionJournal(Path(path), most_bytes=most, clock=clock) if path else None
        lessons = make_in_thread if clock is None else make_now
        self.state = RecordedState(self._journal) if self._journal else CoordinatorState(clock, lessons=lessons)
        self.trust = RecordedTrust(self.state, self._journal) if self._journal else WorkerTrust(self.state)

    def new_rounds(self, public_key: Callable[[str], bytes], run_events: RunEvents) -> DispatchRound:
        """`public_key`: see `DispatchRound`."""
        settings = self._settings
        made = DispatchRound if self._journal is None else partial(RecordedRounds, recorder=self._journal)
        return made(
            self.state,
            self.trust,
            public_key,
            run_events,
            slice_s=settings.slice_s,
            balance=settings.rebalance,
            interactive_slots=settings.interactive_slots,
        )

    def close(self) -> None:
        """End the recording."""
        if self._journal is not None:
            self._journal.close()
