"""Simulates one trainer: it does one piece of work after the other, each for as long as its profile says.

Invariant: the first piece of `_work` ends at `_end` of the trainer's own time, which stands still while it is held.
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

from ebbtide.simulator.engines.trainer_profile import SampleLength, TrainerProfile


class TrainerEventKind(Enum):
    TRAINED = "trained"  # a step: all gradients and optimiser steps
    ACCUMULATED = "accumulated"  # gradients of some samples of a step
    UPDATED = "updated"  # an optimiser step on what was accumulated
    COPIED = "copied"  # the weights, for publication
    SAVED = "saved"  # a checkpoint


class TrainerEvent(NamedTuple):
    at: float  # seconds
    kind: TrainerEventKind
    key: str


class SimulatedTrainer:
    """One trainer. Times are seconds of the simulation and never go back. Work that is given waits for the work before
    it; the key comes back with the event at its end."""

    def __init__(self, profile: TrainerProfile, *, now: float, speed: float = 1.0) -> None:
        """`speed`: as a multiple of the profile's."""
        self.profile, self._speed = profile, speed
        self._work: deque[tuple[float, TrainerEventKind, str]] = deque()
        self._events: list[TrainerEvent] = []
        self._at, self._late = now, 0.0  # its own time, and how far that is behind
        self._end = inf
        self._held_at: float | None = None
        self._done_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which it worked, by the last call."""
        return self._done_s + (self._work[0][0] - (self._end - self._at) if self._work else 0.0)

    @property
    def waiting(self) -> int:
        """Pieces of work that have not ended."""
        return len(self._work)

    def train(
        self, key: str, lengths: Sequence[int], *, now: float, updates: int = 1, epochs: int = 1, forwards: int = 0
    ) -> None:
        """A whole step; see `TrainerProfile.step_s`."""
        seconds = self.profile.step_s(lengths, updates=updates, epochs=epochs, forwards=forwards, seed=key)
        self._give(TrainerEventKind.TRAINED, key, seconds, now)

    def accumulate(self, key: str, lengths: Sequence[int], *, now: float, forwards: int = 0) -> None:
        """Gradients of a part of a step's samples, as soon as they are there."""
        seconds = self.profile.gradient_s([SampleLength(length) for length in lengths], forwards=forwards)
        self._give(TrainerEventKind.ACCUMULATED, key, seconds, now)

    def update(self, key: str, *, now: float) -> None:
        self._give(TrainerEventKind.UPDATED, key, self.profile.costs.update_s, now)

    def copy_weights(self, key: str, *, now: float) -> None:
        """The rest of a publication takes `TrainerProfile.publish_s`, during which the trainer goes on."""
        self._give(TrainerEventKind.COPIED, key, self.profile.delays.snapshot_s, now)

    def save(self, key: str, *, now: float) -> None:
        self._give(TrainerEventKind.SAVED, key, self.profile.delays.checkpoint_s, now)

    def advance(self, now: float) -> list[TrainerEvent]:
        """Works until `now`. Returns what ended since the last call, in the order of time."""
        self._settle(now)
        events, self._events = self._events, []
        return events

    def next_event(self) -> float:
        """When the next piece of work ends if nothing changes; inf: none does."""
        if self._events:
            return self._events[0].at
        return self._end + self._late if self._held_at is None else inf

    def hold(self, now: float) -> None:
        """Stands still until `go_on`; nothing is lost."""
        self._settle(now)
        if self._held_at is None:
            self._held_at = now

    def go_on(self, now: float) -> None:
        if self._held_at is not None:
            self._late += now - self._held_at
            self._held_at = None
            self._settle(now)

    def clear(self, now: float) -> list[str]:
        """Everything is lost: the keys of the work that had not ended."""
        self._settle(now)
        self._done_s = self.busy_s
        lost = [key for _, _, key in self._work]
        self._work.clear()
        self._end = inf
        return lost

    def _give(self, kind: TrainerEventKind, key: str, seconds: float, now: float) -> None:
        self._settle(now)
        self._work.append((seconds / self._speed, kind, key))
        if len(self._work) == 1:
            self._end = self._at + self._work[0][0]

    def _settle(self, now: float) -> None:
        if self._held_at is not None:
            return
        self._at = max(self._at, now - self._late)
        while self._end <= self._at:
            seconds, kind, key = self._work.popleft()
            self._done_s += seconds
            self._events.append(TrainerEvent(self._end + self._late, kind, key))
            self._end = self._end + self._work[0][0] if self._work else inf
