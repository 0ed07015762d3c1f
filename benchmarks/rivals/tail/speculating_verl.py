"""Lets veRL's engines speculate: its placement, with drafts from siblings (Seer, table of speculation alone)."""

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.rivals.tail.divided_policy import PACED_ROUNDS, Pause
from benchmarks.rivals.tail.speculation_pace import SpeculationPace
from benchmarks.rivals.tail.step_members import StepMembers
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import Factor
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import GroupTurns
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class SpeculatingTurns(GroupTurns):
    def __init__(self, coordinator: VirtualCoordinator, pace: SpeculationPace, every_s: float) -> None:
        super().__init__(coordinator)
        self._pace, self.poll_s = pace, every_s
        self._members = StepMembers(coordinator)

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        if engines and self._pace.is_due(now):
            self._pace.update(self._members, self._members.refresh(run, engines, now), now)


class SpeculatingVerlPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """veRL as `VerlPolicy`, with Seer's grouped speculation (`speculation_pace`)."""

    verification: Factor = 1.0  # what draft tokens cost, as a multiple of the profile's
    round_s: Pause = 2.0

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        every_s = PACED_ROUNDS * self.round_s
        pace = SpeculationPace(coordinator, verification=self.verification, every_s=every_s)
        return SpeculatingTurns(coordinator, pace, every_s)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
