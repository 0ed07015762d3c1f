"""Adapts the window as RLBoost's public code does (Terra-Flux/PolyRL, `main` of December 2025), which differs from the
paper. The rule follows written notes on that code, not the code itself, which was neither run nor kept beside.

According to the notes the remote idle time is taken as the step less its generation, in whole seconds. For each number
of instances the code keeps the window with the best throughput so far. While throughput rises the window follows the
paper's integral rule. Once it stops rising the window is drawn to the best one by 0.8 of the distance, and after a
change of the number of instances by 0.2. Tables begin with windows that were tuned by hand. The code has no N_prem, and
waits for a second more than the window. How a draw and the integral rule combine in one step the notes leave open: here
the draw comes after the rule.
"""

from typing import Final

from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.world.training.trainer_loan import LoanWindow

_LEAST_S: Final = 5.0
_EXTRA_S: Final = 1.0
#: How far a window is drawn to the best known one when throughput stops rising, and when the instances change.
_SETTLES: Final = 0.8
_CHANGES: Final = 0.2


class ClimbingWindow(LoanWindow):
    """`eta`: the divisor of a correction; `initial_s`: T_init; `table`: windows by the number of instances, seconds.

    Invariant: `_best` has throughput and window of the best step by the number of instances.
    """

    def __init__(self, decider: PendingBalance, *, eta: float, initial_s: float, table: dict[int, float]) -> None:
        self._decider, self._eta, self._window_s = decider, eta, initial_s
        self._best = {count: (0.0, window_s) for count, window_s in table.items()}
        self._count = decider.remote()
        self._throughput = 0.0

    def open_s(self) -> float | None:
        return self._window_s + _EXTRA_S

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        lasted_s = step.trained_s - step.opened_s
        throughput, present = step.tokens / max(lasted_s, 1e-9), self._decider.remote()
        if throughput > self._best.get(self._count, (0.0, 0.0))[0]:
            self._best[self._count] = (throughput, self._window_s)
        idle_s = max(0.0, lasted_s - self._window_s - learning_s)
        window_s = self._window_s + (idle_s - (step.trained_s - step.generated_s)) / self._eta
        if present in self._best:
            share = _CHANGES if present != self._count else _SETTLES if throughput <= self._throughput else 0.0
            window_s += share * (self._best[present][1] - window_s)
        self._count, self._throughput = present, throughput
        self._window_s = max(_LEAST_S, float(round(window_s)))
