"""Models a run's trainer: it learns from whole steps, or from what has ended, publishes, and writes checkpoints.

Invariant: steps are trained in order, each once. A trainer that died is followed by another, which learns again what
the last checkpoint lacks; what the former one had begun is void.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from ebbtide.simulator.outcome import SimulationBooks, StepOutcome
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.trainer_loan import TrainerLoan
from ebbtide.simulator.world.virtual_time import VirtualTime


class TrainingTimes(Protocol):
    """What a trainer takes for its work, in seconds."""

    def start_s(self) -> float:
        """From its start until it can publish its first version, or go on."""
        ...

    def gradient_s(self, lengths: Sequence[int]) -> float:
        """To compute gradients of samples of so many tokens, prompts included."""
        ...

    def update_s(self) -> float:
        """The optimiser's step, once per training step."""
        ...

    def snapshot_s(self) -> float:
        """To copy the weights, before the next step may change them."""
        ...

    def publish_s(self) -> float:
        """From the copy to the announcement of the version; the trainer goes on meanwhile."""
        ...

    def checkpoint_s(self, step: int) -> float | None:
        """To write the checkpoint that is due behind a step; None: none is."""
        ...


class SimulatedTrainer:
    def __init__(
        self,
        run: str,
        *,
        steps: int,
        stream_batch: int | None,
        time: VirtualTime,
        times: TrainingTimes,
        books: SimulationBooks,
        loan: TrainerLoan,
        announce: Callable[[int, int], None],
    ) -> None:
        """`stream_batch`: it learns from so many samples before the step is complete; None: from none.
        `announce` takes version and step."""
        self._run, self._last, self._stream_batch = run, steps, stream_batch
        self._time, self._times, self._books, self._loan = time, times, books, loan
        self._announce = announce
        self._steps: dict[int, StepProgress] = {}
        self._next = 0  # step to train
        self._learning_s = 0.0  # of that step
        self._newest = -1  # step whose weights were announced last
        self._announced_s = 0.0  # when the version under way will be announced, or the last one was
        self.done_s = inf  # when its last step was trained
        self._busy = True
        self._begun = False
        self._life = 0
        self._unsaved: list[Sequence[int]] = []  # lengths of the samples of the steps since the last checkpoint
        loan.free = self._train
        self.done = False

    def begin(self) -> None:
        self._begun = True
        self._show("idle")
        self._after(self._times.start_s(), self._ready)

    def opened(self, progress: StepProgress) -> None:
        self._steps[progress.number] = progress
        self._loan.opened(progress)

    def scored(self, progress: StepProgress) -> None:  # noqa: ARG002 - whichever step it is, the next one is looked at
        """A step has got further."""
        self._train()

    def _ready(self) -> None:
        """Publish what was not announced yet, and go on."""
        if self._newest < self._next:
            self._newest = self._next
            self._announce(self._next + 1, self._next)
        self._free()

    def _free(self) -> None:
        self._busy = False
        self._show("idle")
        self._loan.open()
        self._train()

    def _train(self) -> None:
        """Learn from what there is, unless the trainer is busy or its devices are lent."""
        step = self._steps.get(self._next)
        if step is None or self._busy:
            return
        fresh = step.lengths[step.learnt :]
        if not step.complete and (self._stream_batch is None or len(fresh) < self._stream_batch):
            self._loan.starve()
            return
        if not self._loan.claim(complete=step.complete):
            return
        self._busy, step.learnt = True, len(step.lengths)
        self._show("training")
        seconds = self._times.gradient_s(fresh)
        self._learning_s += seconds
        if step.complete:
            self._after(seconds + self._times.update_s(), lambda: self._trained(step))
        else:
            self._after(seconds, self._learnt_some)

    def _learnt_some(self) -> None:
        self._busy = False
        self._show("idle")
        self._train()

    def _trained(self, step: StepProgress) -> None:
        self._record(step)
        del self._steps[step.number]
        self._next, self._learning_s = step.number + 1, 0.0
        self._unsaved.append(step.lengths)
        self.done = self._next >= self._last
        if self.done:
            self.done_s = self._time.now
            self._show("idle")
            return
        # As live, a version is announced before the next one is copied.
        self._after(max(0.0, self._announced_s - self._time.now) + self._times.snapshot_s(), self._copied)

    def _copied(self) -> None:
        step, publish_s = self._next, self._times.publish_s()
        self._announced_s = self._time.now + publish_s
        self._after(publish_s, lambda: self._published(step))
        checkpoint_s = self._times.checkpoint_s(step)
        if checkpoint_s is None:
            self._free()
        else:  # it is written once the version is announced
            self._after(publish_s + checkpoint_s, self._saved)

    def _saved(self) -> None:
        self._unsaved.clear()
        self._free()

    def _published(self, step: int) -> None:
        self._newest = step
        self._announce(step + 1, step)

    def lose(self, seconds: float) -> None:
        """The trainer dies; the next one starts after so long."""
        if self.done or not self._begun:
            return
        self._life += 1
        self._busy, self._learning_s = True, 0.0
        for step in self._steps.values():
            step.learnt = 0
        self._show("idle")
        again = sum(self._times.gradient_s(lengths) + self._times.update_s() for lengths in self._unsaved)
        self._after(seconds + self._times.start_s(), lambda: self._catch_up(again))

    def _catch_up(self, seconds: float) -> None:
        self._show("training")
        self._after(seconds, self._ready)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it after so long, unless the trainer dies meanwhile."""
        life = self._life
        self._time.after(seconds, lambda: action() if life == self._life else None)

    def _record(self, step: StepProgress) -> None:
        ends = sorted(step.ends) or [step.opened_s]  # all of it may have ended before it opened
        outcome = StepOutcome(
            run=self._run,
            step=step.number,
            opened_s=step.opened_s,
            generated_s=ends[-1],
            trained_s=self._time.now,
            rollouts=len(ends),
            tokens=step.tokens,
            tail_s=ends[-1] - ends[max(0, int(0.9 * len(ends)) - 1)],
        )
        self._books.steps.append(outcome)
        self._loan.window.trained(outcome, self._learning_s + self._times.update_s())

    def _show(self, state: str) -> None:
        self._books.enter(f"{self._run} trainer", f"{self._run} trainer", state, self._time.now, self._run)
