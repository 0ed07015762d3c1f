"""Chooses the groups that are complete first for a step, and lets the others go on into later ones: tail batching
without bias.

RollPacker (NSDI'26, section 4.1) races over prompts and over the samples of each prompt. The slowest samples of a
finished prompt are lost, so the kept responses are shorter than the policy's. Here the race is over prompts alone. A
step begins more prompts than it trains on. Each prompt keeps all of its samples: they go on, from the tokens that they
have, until the last one ends. So a response's length decides when it is trained on, and never whether.

No prompt is trained more than `max_age` steps after the one that began it, which bounds the age of its tokens too. A
step waits for the prompts that reach that age. This needs room for all of them: hence `MOST_EXCESS`.

Invariant: each begun group is in `_open` (some samples run), in `_whole` (it waits for its place in a step), or was
taken by one step. A process rebuilds all of it from `begun` and the steps' taken groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Final

#: Behind a step at most as many groups stay as the next one trains on. So all of them fit, once they reach their age.
MOST_EXCESS: Final = 2.0
#: Keeps products like 128 x 1.1 from being rounded up for their last digit.
_ROUNDING: Final = 1e-9


class GroupRounds:
    """Groups are numbered from 0 on, in the order in which they begin."""

    def __init__(self, *, groups_per_step: int, steps: int, max_age: int, excess: float) -> None:
        """`max_age`: steps that a group may be trained behind the one that began it, at least 1. `excess`: groups on
        their way at the begin of a step, as a multiple of those that it trains on: 1 to `MOST_EXCESS`. Raises
        `ValueError` for others.
        """
        if max_age < 1 or not 1.0 <= excess <= MOST_EXCESS:
            raise ValueError(f"max_age {max_age} must be at least 1, and excess {excess} within 1 to {MOST_EXCESS}")
        self._per_step, self._total, self._max_age = groups_per_step, groups_per_step * steps, max_age
        self._target = ceil(groups_per_step * excess - _ROUNDING)
        self._open: dict[int, int] = {}  # group -> the step that began it
        self._whole: dict[int, int] = {}
        self._step = self._taken = 0
        self.begun = 0  # groups

    def restore(self, begun: Mapping[int, int], taken: Iterable[int], *, step: int, of_step: int) -> None:
        """Continue where another process stopped, within `step`. `begun`: each group with the step that began it;
        `taken`: groups that some step took, `of_step` of them this one.
        """
        gone = set(taken)
        self._open = {group: first for group, first in begun.items() if group not in gone}
        self._whole, self.begun = {}, len(begun)
        self._step, self._taken = step, of_step

    def open(self, step: int) -> Sequence[int]:
        """The groups that begin with `step`. A step that is opened again begins what it lacks, as a rule nothing."""
        if step != self._step:
            self._step, self._taken = step, 0
        there = len(self._open) + len(self._whole) + self._taken
        fresh = range(self.begun, min(self._total, self.begun + max(0, self._target - there)))
        self._open.update((group, step) for group in fresh)
        self.begun = max(self.begun, fresh.stop)
        return fresh

    def whole(self, group: int) -> None:
        """All samples of a group have ended."""
        self._whole[group] = self._open.pop(group)

    def take(self) -> Sequence[int]:
        """Whole groups that the step trains on, the oldest first; each is told once. Places that groups of the greatest
        age need are kept for them.
        """
        free = self._per_step - self._taken - len(self.awaited())
        chosen = sorted(self._whole, key=lambda group: (self._whole[group], group))[: max(0, free)]
        for group in chosen:
            del self._whole[group]
        self._taken += len(chosen)
        return chosen

    def awaited(self) -> Sequence[int]:
        """Open groups that the step must train on."""
        return [group for group, begun in self._open.items() if begun + self._max_age <= self._step]

    @property
    def complete(self) -> bool:
        """Whether the step has all its groups."""
        return self._taken == self._per_step

    @property
    def on_their_way(self) -> Sequence[int]:
        """Groups that were begun, and that no step took yet."""
        return (*self._open, *self._whole)

    @property
    def waiting(self) -> Sequence[int]:
        """Whole groups that no step took yet."""
        return tuple(self._whole)

    def ages(self, step: int) -> Sequence[int]:
        """By how many steps `step` is behind those that began the groups on their way."""
        return [step - begun for begun in (*self._open.values(), *self._whole.values())]
