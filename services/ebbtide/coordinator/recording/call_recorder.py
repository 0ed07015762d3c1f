"""Sees the outermost calls that change the model, the clock readings in them, and what rounds decide.

Invariant: recorded calls do not wait, so one ends before the next begins. What a recorded call changes by further
recorded calls is part of it, and not recorded again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebbtide.coordinator.recording.decisions import Decision
from ebbtide.coordinator.recording.model_call import ModelCall


class CallRecorder:
    """Keeps nothing of the calls itself; a subclass writes them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._read_clock = clock
        self._inside = False
        self._readings: list[float] = []
        self.decided: list[Decision] = []  # in the last step of a round
        self._gathers = False
        self._attempts = 0

    def clock(self) -> float:
        """The clock of the recorded model."""
        now = self._read_clock()
        if self._inside:
            self._readings.append(now)
        return now

    def new_serial(self) -> int:
        """The serial number of an attempt that is made, from 1 on."""
        self._attempts += 1
        return self._attempts

    @contextmanager
    def handed(self, call: ModelCall) -> Iterator[None]:
        """Record what is done within as `call`, unless it is part of another one."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._end(call)

    @contextmanager
    def gathering(self) -> Iterator[list[Decision]]:
        """Gather what is decided within."""
        self.decided, self._gathers = [], True
        try:
            yield self.decided
        finally:
            self._gathers = False

    def decide(self, decision: Decision) -> None:
        """Note a decision, if a round is under way."""
        if self._gathers:
            self.decided.append(decision)

    def _end(self, call: ModelCall) -> None:
        self._inside, readings = False, self._readings
        self._readings = []
        self.write(call, readings)

    def write(self, call: ModelCall, readings: list[float]) -> None:
        """Take a call that is over. `readings`: of the clock in it."""
