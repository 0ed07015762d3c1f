"""Ebbtide with a trainer that generates between its steps and trains on groups as they are complete."""

from typing import cast

from msgspec import Struct

from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.elastic_window import ElasticWindow
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class ElasticPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide's placement, a window that `scheduling/elastic` decides for the pool of kind "trainer", and gradients
    that are computed group by group. It is told what a live coordinator would know. Its run is the scenario's only one.
    """

    plans: bool = True  # else the window is the pool's
    releases: bool = False  # spot machines that do not make steps shorter are given back, and do not come again

    @property
    def stream_batch(self) -> int | None:
        return 1

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group, together=True)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        if not self.plans:
            return FixedWindow(lent.window_s)
        return ElasticWindow(cast("EbbtideDecider", decider), lent.name, lent.workers or 1, releases=self.releases)
