"""Two plain rules: each turn goes to the least loaded engine; or a session stays at its first one."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from benchmarks.rivals.turns.turn_decider import TurnDecider, TurnRule, has_room, least_loaded
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class LeastLoadedTurns(TurnRule):
    def choose(
        self, one: QueuedRollout, engines: Sequence[WorkerSession], loads: Mapping[str, int], now: float
    ) -> WorkerSession | None:
        del one, now
        return least_loaded(engines, loads)


class StickyTurns(TurnRule):
    def choose(
        self, one: QueuedRollout, engines: Sequence[WorkerSession], loads: Mapping[str, int], now: float
    ) -> WorkerSession | None:
        del now
        last = self.last_engine(one, engines)
        if last is None:
            return least_loaded(engines, loads)
        return last if has_room(last, loads) else None


class _TurnPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keeps: bool = True  # what a lost worker had stored goes on elsewhere

    @property
    def stream_batch(self) -> int | None:
        return None

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)


class LeastLoadedPolicy(_TurnPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each turn goes to the engine with the fewest turns. It is not told prefixes, lengths or speeds."""

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return TurnDecider(coordinator, LeastLoadedTurns(), keeps=self.keeps)


class StickyPolicy(_TurnPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session begins at the engine with the fewest turns and stays there; if that is full it waits. It is not told
    lengths or speeds.
    """

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return TurnDecider(coordinator, StickyTurns(), keeps=self.keeps)
