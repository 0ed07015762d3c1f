"""Defines the recorded calls of attempts, which are named by their serial numbers (`AttemptMade`)."""

from ebbtide.coordinator.recording.model_call import ModelCall, ReplayModel
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt


class AttemptBegun(ModelCall, frozen=True):
    attempt: int
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).begin(self.now)


class StoredBelieved(ModelCall, frozen=True):
    attempt: int
    tokens: int

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).believe_stored(self.tokens)


class AttemptAssigned(ModelCall, frozen=True):
    attempt: int
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).assign(model.session(self.session))


class AttemptUnassigned(ModelCall, frozen=True):
    attempt: int

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).unassign()


class AttemptOrphaned(ModelCall, frozen=True):
    attempt: int
    orphaned: OrphanedAttempt
    lost: int | None

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).orphan(self.orphaned, lost=self.lost)


class DueSet(ModelCall, frozen=True):
    attempt: int
    due: float

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).set_due(self.due)


class AttemptLeft(ModelCall, frozen=True):
    """The store was asked to end an attempt."""

    attempt: int

    def apply(self, model: ReplayModel) -> None:
        model.attempt(self.attempt).leave()
