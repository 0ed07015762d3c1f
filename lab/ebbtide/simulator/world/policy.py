"""Defines what decides in a simulation, for Ebbtide and its rivals alike.

All policies see the same state: the coordinator's. What a rival is not told, its own docstring says.
"""

from typing import Protocol

from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import Rounds
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class Policy(Protocol):
    """A policy for a whole scenario."""

    @property
    def stream_batch(self) -> int | None:
        """The fewest samples that a trainer learns from before a step's last rollout ends; None: it waits for that."""
        ...

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        """What decides where rollouts run."""
        ...

    def rounds(self, run: TrainingRun) -> Rounds:
        """Which rollouts a step of the run begins with, and when it has enough."""
        ...

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        """For how long the trainer's devices generate in each step, as the pool `lent`."""
        ...
