"""Lends a trainer's devices to engines of their own between its steps, for as long as a window says.

Invariant: while the devices are lent the trainer does not train, and while it trains no engine of theirs is attached.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.virtual_time import VirtualTime

#: From the call for the devices until their engines have handed over: the step under way, and one message. Then they
#: give up their memory.
_CLOSE_S: Final = 0.1


class LoanWindow:
    """Says for how long a trainer's devices generate in each step. Most windows are decided once, at their opening."""

    def open_s(self) -> float | None:
        """Seconds from the opening of a step on; None: until the step's last rollout has ended."""
        raise NotImplementedError

    def extend_s(self) -> float:
        """Called once `open_s`, or what this returned, has passed: seconds until it is called again; 0.0: they end."""
        return 0.0

    def surplus(self) -> str | None:
        """Called between steps: the worker of a spot machine that is one too many, and is given back; None: none is."""
        return None

    def opened(self, step: StepProgress) -> None:
        """A step's rollouts are about to be submitted. `step` is kept up to date."""

    def lends(self) -> bool:
        """Whether the devices generate in the step that was just opened at all."""
        return True

    def closed(self) -> None:
        """The devices are the trainer's again."""

    def lends_again(self) -> bool:
        """Whether the trainer, which waits for rollouts of the step under way, lends its devices once more."""
        return False

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        """A step was trained. `learning_s`: for so long of it the trainer computed."""


class FixedWindow(LoanWindow):
    """The same window in each step."""

    def __init__(self, window_s: float | None) -> None:
        self._window_s = window_s

    def open_s(self) -> float | None:
        return self._window_s


class TrainerLoan:
    def __init__(self, time: VirtualTime, window: LoanWindow) -> None:
        self._time, self.window = time, window
        self._workers: list[SimulatedWorker] = []
        self._open = self._lent = self._closing = False
        self._loan = 0  # counts loans
        self.free: Callable[[], None] = lambda: None  # called when the trainer has its devices back

    def add(self, worker: SimulatedWorker) -> None:
        self._workers.append(worker)
        if self._open and not self._closing:
            self._lent = True
            self._wake(worker)

    @property
    def workers(self) -> Sequence[SimulatedWorker]:
        return self._workers

    def open(self) -> None:
        """The trainer waits for rollouts: its devices generate."""
        self._open = True
        if not self._lent:
            self._lend(self.window.open_s)

    def opened(self, step: StepProgress) -> None:
        """A step's rollouts are about to be submitted."""
        self.window.opened(step)
        if not self.window.lends():
            self._close()

    def starve(self) -> None:
        """The trainer has its devices, but nothing to train on before the step is complete."""
        if self._workers and not self._open and not self._lent and self.window.lends_again():
            self._open = True
            self._lend(self.window.extend_s)

    def _lend(self, first_s: Callable[[], float | None]) -> None:
        self._loan += 1
        if not self._workers:
            return
        self._lent = True
        for worker in self._workers:
            self._wake(worker)
        window_s = first_s()
        if window_s is not None:
            self._look_after(window_s)

    def _look_after(self, seconds: float) -> None:
        loan = self._loan
        self._time.after(seconds, lambda: self._look() if self._lends(loan) else None)

    def _look(self) -> None:
        """The window is over, or goes on."""
        more_s = self.window.extend_s()
        if more_s > 0.0:
            self._look_after(more_s)
        else:
            self._close()

    def claim(self, *, complete: bool) -> bool:
        """Whether the trainer may train now. If not, `free` is called when it may. `complete`: its step's rollouts have
        all ended.
        """
        if not self._lent:
            self._open = False
            return True
        if complete:
            self._close()
        return False

    def _wake(self, worker: SimulatedWorker) -> None:
        """Attach once the engine has its weights' memory back, if its devices are still lent then."""
        loan = self._loan
        wake_s = worker.terms.profile.delays.wake_s
        self._time.after(wake_s, lambda: worker.attach() if self._lends(loan) else None)

    def _lends(self, loan: int) -> bool:
        return loan == self._loan and self._lent and not self._closing

    def _close(self) -> None:
        if not self._lent or self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.notice(_CLOSE_S)
        asleep_s = max(worker.terms.profile.delays.sleep_s for worker in self._workers)
        self._time.after(_CLOSE_S + asleep_s, self._closed)

    def _closed(self) -> None:
        for worker in self._workers:
            worker.detach()
        self._open = self._lent = self._closing = False
        self.window.closed()
        self.free()
