"""Begins lost work again, as systems do that keep no tokens of a lost worker."""

from msgspec import Struct

from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class RestartPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide's placement without moves, and without stored tokens: what a lost worker had is generated again.

    It is not told tokens made. It knows learnt speeds for placement, as Ebbtide does.
    """

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator, balance=False, keeps=False)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
