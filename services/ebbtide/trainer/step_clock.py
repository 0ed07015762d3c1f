"""Measures where the time of a training step goes."""

import time
from collections.abc import Awaitable
from typing import Final, TypeVar

from ebbtide.telemetry import counter

T = TypeVar("T")

TRAIN: Final = "train"
_PHASES: Final = ("wait", TRAIN, "publish", "checkpoint")

_seconds = counter("trainer_seconds_total", "Where the trainer's time went", ("phase",))


class StepClock:
    """Measures one step's seconds by phase, and of training those before the step's last group was there."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._trained: list[tuple[float, float]] = []  # from, to
        self._whole_at: float | None = None

    async def measure(self, phase: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        try:
            return await work
        finally:
            ended = time.monotonic()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - began
            _seconds.labels(phase).inc(ended - began)
            if phase == TRAIN:
                self._trained.append((began, ended))

    def whole(self) -> None:
        """Notes that all groups of the step are there. Only the first call counts."""
        if self._whole_at is None:
            self._whole_at = time.monotonic()

    def overlapped_s(self) -> float:
        """Seconds of training before all groups of the step were there. 0 unless `whole` was called."""
        end = self._whole_at or 0.0
        return sum(max(0.0, min(to, end) - began) for began, to in self._trained)

    def learning_s(self) -> float:
        """Seconds of training so far."""
        return self._seconds.get(TRAIN, 0.0)

    def values(self) -> dict[str, float]:
        """Returns the seconds by phase, and those of training that overlapped if `whole` was called."""
        seconds = {f"seconds_{phase}": self._seconds.get(phase, 0.0) for phase in _PHASES}
        return seconds if self._whole_at is None else seconds | {"overlapped_s": self.overlapped_s()}
