"""Records rounds step by step: what each step decided, and each batch of placements."""

from collections.abc import Callable, Iterator

from ebbtide.coordinator.dispatcher.dispatch_round import DispatchRound
from ebbtide.coordinator.dispatcher.host_views import HostViews
from ebbtide.coordinator.dispatcher.round_deeds import Deed, SlotFill
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.round_calls import (
    BatchPlaced,
    FillOver,
    RoundBegun,
    RoundsMade,
    TurnNoted,
    TurnTaken,
)
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import RunEvents
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.scheduling.dispatch.placement import Placement
from ebbtide.scheduling.dispatch.start_pacing import StartPacing


class RecordedRounds(DispatchRound):
    def __init__(
        self,
        state: CoordinatorState,
        trust: WorkerTrust,
        public_key: Callable[[str], bytes],
        run_events: RunEvents,
        *,
        recorder: CallRecorder,
        slice_s: float,
        balance: bool = True,
        interactive_slots: int = 0,
    ) -> None:
        self._recorder = recorder
        with recorder.handed(RoundsMade(slice_s, balance, interactive_slots)):
            super().__init__(
                state,
                trust,
                public_key,
                run_events,
                slice_s=slice_s,
                balance=balance,
                interactive_slots=interactive_slots,
            )

    def turns(self, now: float) -> Iterator[Deed]:
        with self._recorder.handed(RoundBegun(now)):
            steps = super().turns(now)
        while True:
            with self._recorder.gathering() as decided, self._recorder.handed(TurnTaken(decided)):
                deed = next(steps, self)  # itself: the round is over
            if isinstance(deed, RecordedRounds):
                return
            yield deed

    def _new_fill(self, run: RunState, now: float) -> SlotFill:
        return RecordedFill(
            run,
            self._state,
            self._hosts,
            self._starts,
            now,
            recorder=self._recorder,
            interactive_slots=self._interactive_slots,
        )


class RecordedFill(SlotFill):
    def __init__(
        self,
        run: RunState,
        state: CoordinatorState,
        hosts: HostViews,
        starts: StartPacing,
        now: float,
        *,
        recorder: CallRecorder,
        interactive_slots: int = 0,
    ) -> None:
        super().__init__(run, state, hosts, starts, now, interactive_slots=interactive_slots)
        self._recorder = recorder

    def due(self, now: float) -> bool:
        due = super().due(now)
        if not due:
            with self._recorder.handed(FillOver(now)):
                pass
        return due

    def place(self, now: float) -> list[Placement]:
        placed: list[Placement] = []
        with self._recorder.handed(BatchPlaced(self.run.run_id, now, placed)):
            placed += super().place(now)
        return placed

    def note_turn(self, turn_s: float, now: float) -> None:
        with self._recorder.handed(TurnNoted(turn_s, now)):
            super().note_turn(turn_s, now)
