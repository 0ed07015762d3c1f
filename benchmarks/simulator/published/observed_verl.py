"""Notes when rollouts begin and end under veRL's placement, which a simulation's outcome does not list."""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import GroupTurns
from ebbtide.simulator.world.training.step_rounds import RoundChange, Rounds, Sample, StepRound, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Beginnings are looked for so often: a hundredth of the shortest rollout phase that is judged by them.
_LOOK_S: Final = 10.0
#: The paper's late finishers: the last 5 % to end.
_LATE: Final = 0.05


class _NotedTurns(GroupTurns):
    def __init__(self, coordinator: VirtualCoordinator, begins: dict[str, float]) -> None:
        super().__init__(coordinator)
        self._begins, self._next = begins, 0.0

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        super().move(run, engines, now)
        if now >= self._next:
            self._next = now + _LOOK_S
            for attempt in run.running.values():
                if attempt.started:
                    self._begins.setdefault(attempt.rollout.episode_id, now)


class _NotedRound(StepRound):
    def __init__(self, inner: StepRound, note: "ObservedVerl", step: int) -> None:
        self._inner, self._note, self._step = inner, note, step

    def begin(self) -> Sequence[Sample]:
        return self._inner.begin()

    def ended(self, sample: Sample) -> RoundChange:
        self._note.ended(self._step, sample)
        return self._inner.ended(sample)


class _NotedRounds(Rounds):
    def __init__(self, inner: Rounds, note: "ObservedVerl") -> None:
        self._inner, self._note = inner, note

    def open(self, step: int) -> StepRound:
        return _NotedRound(self._inner.open(step), self._note, step)


class ObservedVerl:
    """veRL as `VerlPolicy`, for one step of one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._begins: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        self._clock = coordinator.state.clock
        return _NotedTurns(coordinator, self._begins)

    def rounds(self, run: TrainingRun) -> Rounds:
        return _NotedRounds(WholeGroups(run.prompts, run.group), self)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)

    def ended(self, step: int, sample: Sample) -> None:
        self._ends.append((self._clock(), f"{self._run}.{step}.{sample.prompt}.{sample.sample}"))

    def late_start_share(self) -> float:
        """Mean begin of the rollouts that end last, as a share of the rollout phase."""
        last = [name for _, name in self._ends[-max(1, round(_LATE * len(self._ends))) :]]
        return fmean(self._begins.get(name, 0.0) for name in last) / self._ends[-1][0]
