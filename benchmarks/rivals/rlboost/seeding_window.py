"""Adapts the window in which a trainer's devices generate, as RLBoost does (arXiv 2510.19225, Algorithm 1).

With w_train the trainer's idle time, w_remote the time from the last remote token to the step's end, t_train and
t_remote the busy times, and n the mean number of instances over the step:

    T_seed += (w_train - w_remote) / eta
    N_prem  = (t_remote n + T_seed N_resv) / t_train

A window is remembered for a number of instances if that did not change during the step, and used again with it. The
public code begins with windows that were tuned by hand.
"""

from math import ceil
from typing import Final

from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.world.training.trainer_loan import LoanWindow

#: As the public code has it: a window has at least so many seconds.
_LEAST_S: Final = 5.0
#: The number of instances did not change if its mean is so near to the present one.
_UNCHANGED: Final = 1e-3


class SeedingWindow(LoanWindow):
    """`engines`: N_resv, those on the trainer's devices; `eta`: the divisor of a correction; `initial_s`: T_init;
    `memory`: seconds by the number of instances; None: nothing is remembered.
    """

    def __init__(
        self, decider: PendingBalance, engines: int, *, eta: float, initial_s: float, memory: dict[int, float] | None
    ) -> None:
        self._decider, self._engines, self._eta, self._memory = decider, engines, eta, memory
        self._window_s = initial_s
        decider.most = engines

    @property
    def helpful(self) -> int:
        """N_prem: remote engines beyond these help no more."""
        return self._decider.most or 0

    def open_s(self) -> float | None:
        return self._window_s

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        mean, present = self._decider.take_mean_remote(step.trained_s), self._decider.remote()
        lasted_s = step.trained_s - step.opened_s
        idle_s = max(0.0, lasted_s - self._window_s - learning_s)
        remote_s = step.generated_s - step.opened_s
        window_s = max(_LEAST_S, self._window_s + (idle_s - (step.trained_s - step.generated_s)) / self._eta)
        self._decider.most = max(1, ceil((remote_s * mean + window_s * self._engines) / max(learning_s, 1e-9)))
        if self._memory is not None:
            if abs(mean - present) < _UNCHANGED:
                self._memory[present] = window_s
            window_s = self._memory.get(present, window_s)
        self._window_s = window_s
