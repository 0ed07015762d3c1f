"""Defines the base of recorded calls, and what a replay offers them."""

from typing import Protocol

from msgspec import Struct

from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.recording.decisions import Decision
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.placement import Placement


class ReplayModel(Protocol):
    """The model into which recorded calls are played. What a call names and the model lacks raises `InvalidRequest`."""

    state: CoordinatorState
    trust: WorkerTrust

    def run(self, run_id: str) -> RunState: ...

    def session(self, session_id: str) -> WorkerSession: ...

    def attempt(self, serial: int) -> RunningAttempt: ...

    def keep_run(self, run: RunState) -> None:
        """Remember a run beyond its end: its attempts may still be named."""

    def keep_session(self, session: WorkerSession) -> None:
        """Remember a session that is not attached yet."""

    def keep_attempt(self, attempt: RunningAttempt) -> None:
        """Remember an attempt by its place among those made."""

    def make_rounds(self, *, slice_s: float, balance: bool, interactive_slots: int) -> None: ...

    def begin_round(self, now: float) -> None: ...

    def take_turn(self, decided: list[Decision]) -> None:
        """Go on with the round, and compare its decisions with those of the recorded one."""

    def place(self, run_id: str, now: float, placed: list[Placement]) -> None:
        """Place a batch, and compare it with the recorded one."""

    def fill_over(self, now: float) -> None: ...

    def note_turn(self, turn_s: float, now: float) -> None: ...


class ModelCall(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An outermost call that changed the model, or a step of a round."""

    def apply(self, model: ReplayModel) -> None:
        """Do it again."""
        raise NotImplementedError
