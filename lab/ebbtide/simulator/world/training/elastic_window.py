"""Has Ebbtide's own rule decide for how long a trainer's devices generate: shows it what a live coordinator tells.
`ElasticPolicy` is Ebbtide with such a trainer, which trains on groups as they complete.

Invariant: `_step` is the step under way, once it was opened.
"""

from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.coordinator.api.remaining_work import RemainingWorkReader
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.simulator.engines.engine_profile import EngineDelays
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.machine_events import pool_of
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator
from ebbtide.trainer.lending.step_window import SOONEST_S, StepWindow, TrainedStep, TrainerStep
from ebbtide.types.remaining_work import RemainingWork


class ElasticWindow(LoanWindow):
    """`lent`: the pool of the trainer's engines, so many of them as `engines`; `releases`: spot engines that are too
    many are given back, one after each step.
    """

    def __init__(self, decider: EbbtideDecider, lent: str, engines: int, *, releases: bool = False) -> None:
        self._lent, self._engines, self._releases = lent, engines, releases
        self._coordinator, self._state = decider.coordinator, decider.coordinator.state
        self._reader = RemainingWorkReader(self._state, decider.speed)
        self.window = StepWindow()
        self._step: StepProgress | None = None
        self._taught = False
        self._spare = ""  # the engine elsewhere that is too many in the step under way

    def opened(self, step: StepProgress) -> None:
        self._step, self._spare = step, ""

    def lends(self) -> bool:
        run = self._run()
        if self._step is None or run is None or not self._taught:
            return True
        left, step = self._seen(run, self._step, coming=True)
        lends = self.window.lends(left, step)
        self._spare = self.window.surplus(left, step) if self._releases else ""
        return lends

    def open_s(self) -> float | None:
        return SOONEST_S

    def extend_s(self) -> float:
        run = self._run()
        if self._step is None or run is None:
            return SOONEST_S
        return self.window.look_s(*self._seen(run, self._step))

    def closed(self) -> None:
        run = self._run()
        if self._step is not None and run is not None:
            self.window.closed(*self._seen(run, self._step))

    def surplus(self) -> str | None:
        spare, self._spare = self._spare, ""
        return spare if spare and any(one.worker_id == spare for one in self._state.sessions.values()) else None

    def lends_again(self) -> bool:
        run = self._run()
        if self._step is None or run is None:
            return False
        return self.window.lends_again(self._state.clock(), *self._seen(run, self._step))

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        del step
        if (progress := self._step) is None:
            return
        responses = list(progress.responses.values())
        self.window.trained(TrainedStep(responses=responses, tokens=sum(progress.lengths), learning_s=learning_s))
        self._taught = True

    def _run(self) -> RunState | None:
        return next(iter(self._state.runs.values()), None)

    def _seen(self, run: RunState, step: StepProgress, *, coming: bool = False) -> tuple[RemainingWork, TrainerStep]:
        """`coming`: the step is not submitted yet. Nobody tells the coordinator that an episode is over here, so groups
        that have ended count as there. Devices without an attached engine have one that is asleep.
        """
        groups = run.spec.batch.groups_per_step
        left = replace(self._gathered(run, 0 if coming else groups), ended=0)
        mine = [name for name in left.engines if pool_of(name) == self._lent]
        asleep = [f"{self._lent} asleep {at}" for at in range(self._engines - len(mine))]
        sleeping = len(asleep)
        left = replace(
            left,
            engines=(*left.engines, *asleep),
            speeds=(*left.speeds, *[1.0] * sleeping),
            versions=(*left.versions, *[run.versions.newest] * sleeping),
            rollouts=(*left.rollouts, *[0] * sleeping),
            lent=(*left.lent, *[False] * sleeping),
            spot=(*left.spot, *[False] * sleeping),
            shares=(*left.shares, *[1.0] * sleeping),
        )
        delays = self._delays()
        return left, TrainerStep(
            missing=groups if coming else left.open,
            complete=0 if coming else groups - left.open,
            ready_tokens=sum(step.lengths[step.learnt :]),
            local=frozenset((*mine, *asleep)),
            on_s=delays.wake_s,
            off_s=delays.sleep_s,
        )

    def _gathered(self, run: RunState, groups: int) -> RemainingWork:
        gathering = self._reader.gather(run, groups)
        while True:
            try:
                next(gathering)
            except StopIteration as done:
                left: RemainingWork = done.value
                return left

    def _delays(self) -> EngineDelays:
        mine = next((one for one in self._state.sessions.values() if pool_of(one.worker_id) == self._lent), None)
        return self._coordinator.worker(mine.session_id).terms.profile.delays if mine else EngineDelays()


class ElasticPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide's placement, the trainer's `StepWindow` for the pool of kind "trainer", and gradients that are
    computed group by group. It is told what a live coordinator would know. Its run is the scenario's only one.
    """

    plans: bool = True  # otherwise the window is the pool's `window_s`
    releases: bool = False  # give back spot machines that do not make steps shorter, for good

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
