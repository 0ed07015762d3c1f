"""Defines the recorded steps of rounds."""

from ebbtide.coordinator.recording.decisions import Decision
from ebbtide.coordinator.recording.model_call import ModelCall, ReplayModel
from ebbtide.scheduling.dispatch.placement import Placement


class RoundsMade(ModelCall, frozen=True):
    slice_s: float
    balance: bool
    interactive_slots: int = 0

    def apply(self, model: ReplayModel) -> None:
        model.make_rounds(slice_s=self.slice_s, balance=self.balance, interactive_slots=self.interactive_slots)


class RoundBegun(ModelCall, frozen=True):
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.begin_round(self.now)


class TurnTaken(ModelCall, frozen=True):
    """A round went on to its next deed, or to its end."""

    decided: list[Decision]

    def apply(self, model: ReplayModel) -> None:
        model.take_turn(self.decided)


class BatchPlaced(ModelCall, frozen=True):
    run: str
    now: float
    placed: list[Placement]

    def apply(self, model: ReplayModel) -> None:
        model.place(self.run, self.now, self.placed)


class FillOver(ModelCall, frozen=True):
    """Nothing more of the run was to be placed in this round."""

    now: float

    def apply(self, model: ReplayModel) -> None:
        model.fill_over(self.now)


class TurnNoted(ModelCall, frozen=True):
    """Others had had their turn, which took so long, after a batch."""

    turn_s: float
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.note_turn(self.turn_s, self.now)
