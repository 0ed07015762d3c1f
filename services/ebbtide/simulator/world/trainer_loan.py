"""Lends a trainer's devices to engines of their own between its steps, by a fixed rule.

Invariant: while the devices are lent the trainer does not train, and while it trains no engine of theirs is attached.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ebbtide.simulator.world.simulated_worker import SimulatedWorker
from ebbtide.simulator.world.virtual_time import VirtualTime

#: From the call for the devices until their engines have handed over: the step under way, and one message.
_CLOSE_S: Final = 0.1


class TrainerLoan:
    """`window_s`: the loan ends so long after the step was opened; None: with the step's last rollout."""

    def __init__(self, time: VirtualTime, window_s: float | None) -> None:
        self._time, self._window_s = time, window_s
        self._workers: list[SimulatedWorker] = []
        self._open = self._lent = self._closing = False
        self._step = 0
        self.free: Callable[[], None] = lambda: None  # called when the trainer has its devices back

    def add(self, worker: SimulatedWorker) -> None:
        self._workers.append(worker)
        if self._open and not self._closing:
            self._lent = True
            worker.attach()

    @property
    def workers(self) -> Sequence[SimulatedWorker]:
        return self._workers

    def open(self) -> None:
        """The trainer waits for rollouts: its devices generate."""
        self._step += 1
        self._open = True
        if self._lent or not self._workers:
            return
        self._lent = True
        for worker in self._workers:
            worker.attach()
        if self._window_s is not None:
            step = self._step
            self._time.after(self._window_s, lambda: self._close() if step == self._step else None)

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

    def _close(self) -> None:
        if not self._lent or self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.notice(_CLOSE_S)
        self._time.after(_CLOSE_S, self._closed)

    def _closed(self) -> None:
        for worker in self._workers:
            worker.detach()
        self._open = self._lent = self._closing = False
        self.free()
