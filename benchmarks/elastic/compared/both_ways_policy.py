"""Lends devices both ways, as BiDiRL does (volcengine verl-recipe, request 129): the trainer's generate for a window,
and those of reserved engines compute gradients once all rollouts of a step have ended.

The rule follows written notes on that request. They say nothing of how the window is chosen, so Ebbtide's rule
chooses it. Gradients are computed so many times as fast as there are devices then, and their exchange costs nothing:
both are to the rival's advantage. A micro-batch that has begun before is not made faster.
"""

from collections.abc import Sequence
from typing import cast

from msgspec import Struct, field

from benchmarks.simulator.published.paper_setting import PaperTimes
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.elastic_window import ElasticWindow
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class HelpedTimes(PaperTimes, frozen=True):
    """`steps`: those that were opened, in order. `helped`: so many times as fast once the newest one's rollouts have
    ended.
    """

    steps: list[StepProgress] = field(default_factory=list)
    helped: float = 1.0

    def gradient_s(self, lengths: Sequence[int]) -> float:
        alone_s = PaperTimes.gradient_s(self, lengths)
        return alone_s / self.helped if self.steps and self.steps[-1].complete else alone_s


class _NotedWindow(ElasticWindow):
    """Ebbtide's window. Notes each step for the trainer's times."""

    def __init__(self, decider: EbbtideDecider, lent: MachinePool, steps: list[StepProgress]) -> None:
        super().__init__(decider, lent.name, lent.workers or 1)
        self._opened = steps

    def opened(self, step: StepProgress) -> None:
        self._opened.append(step)
        super().opened(step)


class BothWaysPolicy(Struct, frozen=True, kw_only=True):
    """`helped`: all devices over the trainer's own."""

    helped: float
    steps: list[StepProgress] = field(default_factory=list)

    @property
    def stream_batch(self) -> int | None:
        return 1

    def times(self, alone: PaperTimes) -> PaperTimes:
        return HelpedTimes(
            token=alone.token, update=alone.update, snapshot=alone.snapshot, steps=self.steps, helped=self.helped
        )

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group, together=True)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        return _NotedWindow(cast("EbbtideDecider", decider), lent, self.steps)
