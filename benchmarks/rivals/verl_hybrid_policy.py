"""Lends a trainer's devices by verl's hybrid rule: all or none, until enough samples are there for a step.

The rule follows written notes on `verl/trainer/ppo/v1/trainer_separate_async.py` (verl 0.10), not that file itself. By
the notes the devices are lent if what is to be waited for is worth more than a switch to rollouts and back, each as the
mean of its last three. They are reclaimed once a share of the batch can be trained on. The share starts at 0.4, grows
by 0.05 after two steps in which the trainer waited, and falls by 0.03 after two in which it did not. Work under way on
reclaimed devices is aborted, and begins again elsewhere.
"""

from collections import deque
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import GroupTurns
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

_POLL_S: Final = 2.0
_FIRST_SHARE: Final = 0.4
_LEAST_SHARE: Final = 1.0 / 16
_MORE: Final = 0.05
_LESS: Final = 0.03
_IN_A_ROW: Final = 2


class VerlHybridWindow(LoanWindow):
    """Invariant: `_batch` is the number of samples of the last step. Of the first one it is not known, and the devices
    are lent to its end.
    """

    def __init__(self) -> None:
        self._batch, self._share = 1 << 30, _FIRST_SHARE
        self._step: StepProgress | None = None
        self._waited: deque[bool] = deque(maxlen=_IN_A_ROW)

    def opened(self, step: StepProgress) -> None:
        self._step = step

    def open_s(self) -> float | None:
        return _POLL_S

    def extend_s(self) -> float:
        ended = len(self._step.lengths) if self._step is not None else 0
        return 0.0 if ended >= max(1, round(self._share * self._batch)) else _POLL_S

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        self._batch = step.rollouts
        idle_s = step.generated_s - step.opened_s - learning_s
        self._waited.append(idle_s > _POLL_S)
        if len(self._waited) < _IN_A_ROW or fmean(self._waited) not in (0.0, 1.0):
            return
        self._share += _MORE if self._waited[0] else -_LESS
        self._share = min(1.0, max(_LEAST_SHARE, self._share))
        self._waited.clear()


class VerlHybridPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """verl's placement of whole groups in turn, and its hybrid rule for the pool of kind "trainer".

    Strictly on-policy: only samples of the step under way can be trained on. A switch takes the seconds in which the
    pool's engines wake and sleep. They are few beside the wait at a step's opening, when nothing can be trained on yet.
    So the rule's comparison would always lend, and is left out: the devices are lent in each step. Gradients are
    computed group by group, which is to the rule's advantage.
    """

    @property
    def stream_batch(self) -> int | None:
        return 1

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return GroupTurns(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group, together=True)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider, lent
        return VerlHybridWindow()
