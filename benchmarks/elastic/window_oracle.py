"""Finds the best window of each step by trying several in copies of the simulated world.

The copies are made by fork at the step's opening, so each tried window meets the very fleet and work that will come.
Placement and streaming are Ebbtide's. The choice is the best one for each step by itself, of `TRIED` windows: a finer
search would find a little more.
"""

import os
from typing import Final

from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Windows that are tried, as multiples of the last step's best one; then those between the best and its neighbours.
_MULTIPLES: Final = (0.0, 0.6, 1.0, 1.6, 2.6)
#: The most windows of a step that are tried.
TRIED: Final = len(_MULTIPLES) + 2
#: The middle of the windows that are tried in the first step, in seconds.
_FIRST_S: Final = 150.0
#: Multiples are taken of no less than this.
_LEAST_S: Final = 30.0


class OracleWindow(LoanWindow):
    """Invariant: `_trial` is the pipe of a copy that tries a window in the step under way; None in the real world."""

    def __init__(self) -> None:
        self._last_s = _FIRST_S
        self._trial: int | None = None

    def open_s(self) -> float | None:
        """Try windows in copies, each until its step is trained."""
        if self._trial is not None:
            return self._last_s
        middle_s = max(_LEAST_S, self._last_s)
        tried = dict[float, float]()
        for window_s in (factor * middle_s for factor in _MULTIPLES):
            if (ended_s := self._tried(window_s)) is None:
                return self._last_s  # this is a copy
            tried[window_s] = ended_s
        windows = sorted(tried)
        best_s = min(tried, key=tried.__getitem__)
        at = windows.index(best_s)
        for other_s in windows[max(0, at - 1) : at + 2]:
            between_s = 0.5 * (best_s + other_s)
            if other_s != best_s:
                if (ended_s := self._tried(between_s)) is None:
                    return self._last_s
                tried[between_s] = ended_s
        self._last_s = min(tried, key=tried.__getitem__)
        return self._last_s

    def _tried(self, window_s: float) -> float | None:
        """When the step ends with such a window; None in the copy that tries it."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            self._trial, self._last_s = write, window_s
            return None
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        if not text:
            raise RuntimeError(f"the copy that tried a window of {window_s:.1f} s ended without an answer")
        return float(text)

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        """End the copy, and answer."""
        del learning_s
        if self._trial is not None:
            os.write(self._trial, repr(step.trained_s).encode())
            os._exit(0)


class OraclePolicy:
    """Ebbtide's placement with the oracle's window."""

    @property
    def stream_batch(self) -> int | None:
        return 1

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group, together=True)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider, lent
        return OracleWindow()
