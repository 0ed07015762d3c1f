"""Counts the steps that an engine makes one after another while the same sequences run."""

from math import sqrt
from typing import Final


class StepRun:
    """`steps` steps from `begin` on. Each takes `growth_s` longer than the one before, as contexts grow.

    So n steps take n `first_s` + n (n - 1) / 2 `growth_s`, and how many end by a given time follows in closed form.
    """

    __slots__ = ("begin", "done", "end", "first_s", "growth_s", "steps")

    def __init__(self, begin: float, steps: int, first_s: float, growth_s: float) -> None:
        self.begin: Final = begin
        self.first_s: Final = first_s
        self.growth_s: Final = growth_s
        self.steps: Final = steps
        self.end: Final = self.after(steps)
        self.done = 0  # steps that have ended, by the last `follow`

    def after(self, steps: int) -> float:
        """When so many steps have ended."""
        return self.begin + (steps * self.first_s + steps * (steps - 1) // 2 * self.growth_s)

    def follow(self, now: float) -> None:
        """Sets `done` to the steps that end by `now`."""
        if now >= self.end:
            self.done = self.steps
            return
        done = min(max(self.done, self._estimate(now - self.begin)), self.steps - 1)
        while done and self.after(done) > now:
            done -= 1
        while self.after(done + 1) <= now:
            done += 1
        self.done = done

    def steps_until(self, at: float) -> int:
        """The fewest steps that do not end before `at`, which is within the run."""
        self.follow(at)
        return self.done + (self.after(self.done) < at)

    def _estimate(self, elapsed: float) -> int:
        """The root of the closed form, which rounding may put one step off."""
        if elapsed <= 0.0:
            return 0
        if self.growth_s <= 0.0:
            return int(elapsed / self.first_s)
        linear = self.first_s - self.growth_s / 2
        # This form of the root keeps its digits when the growth is small.
        return int(2.0 * elapsed / (linear + sqrt(linear * linear + 2.0 * self.growth_s * elapsed)))
