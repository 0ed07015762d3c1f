"""Schedules the longest rollouts first, as nobody can who does not know lengths: an oracle to compare with."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.rivals.ablated_policy import FREE_MOVES
from ebbtide.coordinator.dispatch.moves import EngineLoad, RunningRollout, rebalance
from ebbtide.coordinator.forecasts.length_learner import EDGES, LengthCurve
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.placement import Placement, place
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.engines.engine_profile import StepCosts
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import RivalDecider, request_release
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Moves are free, but are made only where they change something: between equals they would never end.
_USEFUL_MOVES: Final = replace(FREE_MOVES, advantage=1.001)
#: Moves are decided so often.
_LOOK_S: Final = 1.0


class ToldSpeed(WorkerThroughput):
    """An engine's speed as it is."""

    def __init__(self, costs: StepCosts, speed: float) -> None:
        super().__init__()
        self._costs, self._factor = costs, speed

    def rate(self, running: float, context: float) -> float:
        if running <= 0:
            return 0.0
        return self._factor / self._costs.step_s(batch=int(running), context=running * context)

    def plateau(self, context: float) -> int:  # noqa: ARG002
        return self._costs.spare


#: Each runs for as long as its budget says, which is what a rollout has left.
_TOLD: Final = LengthCurve(np.ones(len(EDGES)))


class LongestFirst(RivalDecider):
    """`up_to_plateau`: engines get no more rollouts than they run at full speed."""

    def __init__(self, coordinator: VirtualCoordinator, *, up_to_plateau: bool) -> None:
        super().__init__(coordinator, keeps=True)
        self._up_to_plateau = up_to_plateau
        self._looked = 0.0

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        """The rollouts with most tokens left go where they run fastest."""
        workers = [self._view(run, engine) for engine in engines]
        if not run.queue or all(worker.running >= worker.slots for worker in workers):
            return []
        queued = sorted(run.queue, key=lambda one: (one.made - self._length(one.rollout_id), one.place))
        return place(queued, workers, {}, pending_limit=lambda worker: worker.slots, now=now)

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        if len(engines) < 2 or now - self._looked < _LOOK_S:
            return
        self._looked = now
        coming = Counter(a.target for one in engines for a in one.attempts.values() if a.target)
        loads = [self._load(run, engine, coming) for engine in engines]
        by_id = {engine.session_id: engine for engine in engines}
        for move in rebalance(loads, _TOLD, now=now, costs=_USEFUL_MOVES):
            source = by_id[move.source]
            request_release(source, by_id[move.target], [source.attempts[move.attempt_id]])

    def _load(self, run: RunState, engine: WorkerSession, coming: Counter[str]) -> EngineLoad:
        worker = self._view(run, engine)
        leaving = sum(bool(a.target) for a in engine.attempts.values())
        worker = replace(worker, running=worker.running - leaving + coming[engine.worker_id])
        contexts = [a.length for a in engine.attempts.values()]
        return EngineLoad(
            worker=worker,
            speed=self._speed(engine),
            context=sum(contexts) / max(1, len(contexts)),
            rollouts=lambda: [self._running(a) for a in engine.attempts.values() if not a.target],
        )

    def _running(self, attempt: RunningAttempt) -> RunningRollout:
        return RunningRollout(
            attempt_id=attempt.attempt_id,
            rollout=attempt.rollout,
            length=attempt.length,
            made=attempt.stored,
            budget=self._length(attempt.rollout.rollout_id) - attempt.stored,
            since=attempt.given,
            started=attempt.started,
        )

    def _view(self, run: RunState, engine: WorkerSession) -> WorkerView:
        running, version = len(engine.attempts), engine.version_of(run.run_id)
        speed, slots = self._speed(engine), engine.hello.slots
        spare = self._coordinator.worker(engine.session_id).terms.profile.costs.spare
        return WorkerView(
            session_id=engine.session_id,
            worker_id=engine.worker_id,
            slots=min(slots, spare) if self._up_to_plateau and spare else slots,
            running=running,
            pending=len(engine.pending),
            rate=speed.rate(running + 1, 0.0),
            plateau=spare,
            installed=version,
            target=version,
            max_model_len=engine.hello.engine.max_model_len,
        )

    def _speed(self, engine: WorkerSession) -> ToldSpeed:
        worker = self._coordinator.worker(engine.session_id)
        return ToldSpeed(worker.terms.profile.costs, worker.speed)

    def _length(self, rollout_id: str) -> int:
        return self._coordinator.response(rollout_id).length


class ClairvoyantPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Longest rollouts first, and moves whenever they make one faster.

    It is told every length and how fast each engine is. It is not told what will become of the fleet. That its moves
    and losses cost little is the scenario's matter: without prefill, and with a short notice before each loss.
    """

    up_to_plateau: bool = False  # engines get no more than they run at full speed, so that none slows down the longest

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return LongestFirst(coordinator, up_to_plateau=self.up_to_plateau)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
