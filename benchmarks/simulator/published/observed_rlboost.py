"""Reads N_prem of RLBoost's rule, which a simulation's outcome does not list."""

from typing import cast

from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from benchmarks.rivals.rlboost.seeding_window import SeedingWindow
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import Rounds
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class ObservedRLBoost:
    """The policy, with a window that adapts."""

    def __init__(self, policy: RLBoostPolicy) -> None:
        self._policy = policy
        self._window: SeedingWindow | None = None

    @property
    def stream_batch(self) -> int | None:
        return self._policy.stream_batch

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return self._policy.decider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return self._policy.rounds(run)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        self._window = cast("SeedingWindow", self._policy.window(decider, lent))
        return self._window

    @property
    def helpful(self) -> int:
        """N_prem now; 0 without engines on the trainer's devices."""
        return self._window.helpful if self._window else 0
