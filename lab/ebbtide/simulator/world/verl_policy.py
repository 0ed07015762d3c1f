"""Deals whole groups to engines in turn, as veRL does in the comparisons of Seer, RollPacker and RLBoost."""

from collections.abc import Sequence

from msgspec import Struct

from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_decider import IDLE_POLL_S, RivalDecider, fits
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class GroupTurns(RivalDecider):
    """Each group goes to the next engine, whole and at once; the engine queues what it cannot run yet. Invariant: a
    group's engine is in `_engines`, until that engine is lost."""

    poll_s = IDLE_POLL_S

    def __init__(self, coordinator: VirtualCoordinator, *, keeps: bool = False) -> None:
        super().__init__(coordinator, keeps=keeps)
        self._engines: dict[int, str] = {}  # group -> session
        self._turn = self._newest = 0

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        del now
        if run.newest != self._newest:  # another step's groups
            self._newest, self._engines, self._turn = run.newest, {}, 0
        present = {engine.session_id for engine in engines}
        placements = []
        for one in list(run.queue):
            if not fits(one, engines[0], run):
                continue
            engine = self._engines.get(one.group)
            if engine not in present:
                engine = engines[self._turn % len(engines)].session_id
                self._engines[one.group] = engine
                self._turn += 1
            placements.append(Placement(one.rollout_id, engine))
        return placements


class VerlPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """veRL as others measured it: co-located and synchronous, whole groups in turn, nothing moves (Seer, arXiv
    2511.14617, section 2; RLBoost, arXiv 2510.19225, section 7).

    It is not told lengths, tokens made, or how many rollouts an engine has. Pools of kind "trainer" without a window
    are its engines.
    """

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return GroupTurns(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
