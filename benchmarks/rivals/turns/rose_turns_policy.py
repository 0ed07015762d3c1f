"""Places turns as ROSE's scheduler does (arXiv 2605.06534), as far as notes on the paper tell it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from benchmarks.rivals.turns.turn_decider import TurnDecider, TurnRule, least_loaded
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import request_release
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: A worker without a token for so long has stalled, and its turns go elsewhere.
_STALLED_S: Final = 2.0


class AffineTurns(TurnRule):
    """`cap`: turns that a worker has at most. In the order of arrival, a turn goes to the worker of the episode's last
    turn if that is below the cap; else to a serving worker that is granted, or, if `dedicated_first`, to a dedicated
    one before it; of several to the least loaded; else it waits.
    """

    def __init__(self, *, cap: int, dedicated_first: bool) -> None:
        super().__init__()
        self._cap, self._dedicated_first = cap, dedicated_first

    def order(self, run: RunState) -> list[QueuedRollout]:
        return sorted(run.queue, key=lambda one: one.since)

    def choose(
        self, one: QueuedRollout, engines: Sequence[WorkerSession], loads: Mapping[str, int], now: float
    ) -> WorkerSession | None:
        below = [engine for engine in engines if loads[engine.session_id] < min(self._cap, engine.hello.slots)]
        able = [engine for engine in below if not engine.reclaimed and not _stalled(engine, now)]
        last = self.last_engine(one, able)
        if last is not None:
            return last
        first = [engine for engine in able if engine.borrowed is not self._dedicated_first]
        return least_loaded(first, loads) or least_loaded(able, loads)

    def move(self, engines: Sequence[WorkerSession], now: float) -> None:
        loads = {engine.session_id: len(engine.attempts) for engine in engines}
        able = [engine for engine in engines if not engine.reclaimed and not _stalled(engine, now)]
        for engine in engines:
            target = least_loaded(able, loads)
            held = [attempt for attempt in engine.attempts.values() if not attempt.target]
            if target is not None and held and (_stalled(engine, now) or engine.reclaimed):
                loads[target.session_id] += len(held)
                request_release(engine, target, held)


def _stalled(engine: WorkerSession, now: float) -> bool:
    begun = [attempt.given for attempt in engine.attempts.values()]
    return bool(begun) and now - max(engine.append_stream.progressed, min(begun)) > _STALLED_S


class RoseTurnsPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ROSE's rule for turns. It is not told lengths, speeds, what a prefix costs to read, or how long a grant lasts; it
    knows each worker's number of turns, grant and last token. A turn that is cut begins again after the last whole one.

    The notes give 16 turns as the cap of a GPU for Qwen3 at 32k. They differ on which workers come first.
    """

    cap: Annotated[int, Meta(ge=1, le=65_536)] = 16
    dedicated_first: bool = False
    keeps: bool = False  # else a cut turn begins again

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        rule = AffineTurns(cap=self.cap, dedicated_first=self.dedicated_first)
        return TurnDecider(coordinator, rule, keeps=self.keeps)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
