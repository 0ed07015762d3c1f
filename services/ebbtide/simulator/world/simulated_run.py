"""Models a run: its driver, which submits steps as the live one does, and its trainer, which learns and publishes.

Invariant: a step is trained once, in order, when its round is complete. A version is announced when the trainer has
published it. `open_steps` and `training_bounds` decide what may be submitted, as they do in the live driver.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from ebbtide.scheduling.steps.step_pacing import VersionBounds, open_steps, training_bounds
from ebbtide.simulator.scenario.draws.workload import Turn
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.world.books import SimulationBooks
from ebbtide.simulator.world.simulated_rollout import SimulatedRollout
from ebbtide.simulator.world.step_rounds import Rounds, Sample, StepRound
from ebbtide.simulator.world.virtual_time import VirtualTime


class Learning(Protocol):
    """What a trainer takes for its work, in seconds."""

    def begin_s(self) -> float:
        """From the run's begin to its first version."""
        ...

    def learn_s(self, tokens: int, samples: int) -> float: ...

    def update_s(self) -> float:
        """The optimiser's step, once per training step."""
        ...

    def publish_s(self) -> float:
        """From the optimiser's step to the announcement of the version."""
        ...

    def checkpoint_s(self, step: int) -> float: ...


class RunTerms(Struct, frozen=True, kw_only=True):
    """A run as the scenario asks for it."""

    name: str
    steps: int
    max_staleness: int
    streamed: bool = False  # the trainer begins with what has ended, before the last rollout ends
    trainer_machines: int = 1


class RunsCoordinator(Protocol):
    """What a run's driver and trainer ask of the coordinator."""

    def submit(self, rollouts: Sequence[SimulatedRollout]) -> None: ...
    def cancel(self, rollouts: Sequence[SimulatedRollout]) -> None: ...
    def announce(self, run: str, version: int, step: int) -> None: ...


class _Step(Struct):
    number: int
    round: StepRound
    opened_s: float
    ends: list[float] = []
    tokens: int = 0
    learnt: int = 0  # tokens that the trainer has begun to learn from
    complete_s: float = -1.0


class SimulatedRun:
    def __init__(
        self,
        terms: RunTerms,
        *,
        time: VirtualTime,
        coordinator: RunsCoordinator,
        books: SimulationBooks,
        rounds: Rounds,
        turns: Callable[[Sample], Sequence[Turn]],
        learning: Learning,
        phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`turns`: an episode's turns; `phase` hears when the trainer begins to train and when it is free."""
        self.terms, self._time, self._coordinator, self._books = terms, time, coordinator, books
        self._rounds, self._turns, self._learning, self._phase = rounds, turns, learning, phase
        self._versions: dict[int, int] = {}  # step -> version
        self._steps: dict[int, _Step] = {}
        self._next_open = self._next_train = 0
        self._place = 0
        self._live: dict[str, tuple[_Step, Sample, int]] = {}  # rollout -> its step, sample and turn
        self._waiting: dict[Sample, _Step] = {}  # between turns
        self._rollouts: dict[Sample, SimulatedRollout] = {}
        self._training: _Step | None = None
        self.done = False

    def begin(self) -> None:
        self._show("idle")
        self._time.after(self._learning.begin_s(), lambda: self._announce(0))

    @property
    def open_rollouts(self) -> int:
        """Rollouts that have not ended."""
        return len(self._live)

    # The driver.

    def _announce(self, step: int) -> None:
        self._versions[step] = version = step + 1
        self._coordinator.announce(self.terms.name, version, step)
        self._open()

    def _open(self) -> None:
        terms = self.terms
        for number in open_steps(self._versions, steps=terms.steps, max_staleness=terms.max_staleness):
            if number < self._next_open:
                continue
            self._next_open = number + 1
            bounds = training_bounds(self._versions, step=number, max_staleness=terms.max_staleness)
            step = self._steps[number] = _Step(number, self._rounds.open(number), self._time.now)
            self._coordinator.submit([self._rollout(step, sample, 0, bounds, 0) for sample in step.round.begin()])

    def _rollout(self, step: _Step, sample: Sample, turn: int, bounds: VersionBounds, context: int) -> SimulatedRollout:
        work = self._turns(sample)[turn]
        name = f"{self.terms.name}.{step.number}.{sample.prompt}.{sample.sample}"
        rollout = SimulatedRollout(
            rollout_id=f"{name}.{turn}",
            episode_id=name,
            run=self.terms.name,
            step=step.number,
            group=sample.prompt,
            bounds=bounds,
            prompt=context + work.prompt,
            length=work.response,
            prefix=name if turn else f"{self.terms.name}.{sample.prompt}",
            place=self._place,
            submitted_s=self._time.now,
        )
        self._place += 1
        self._live[rollout.rollout_id] = (step, sample, turn)
        self._rollouts[sample] = rollout
        return rollout

    def ended(self, rollout: SimulatedRollout) -> None:
        """A rollout has ended: its environment takes its step, or the episode is complete."""
        step, sample, turn = self._live.pop(rollout.rollout_id)
        step.tokens += rollout.length
        work = self._turns(sample)
        if turn + 1 < len(work):
            self._waiting[sample] = step
            self._time.after(work[turn].wait_s, lambda: self._go_on(step, sample, turn + 1, rollout))
            return
        self._time.after(work[turn].wait_s, lambda: self._scored(step, sample))

    def _go_on(self, step: _Step, sample: Sample, turn: int, before: SimulatedRollout) -> None:
        if self._waiting.pop(sample, None) is None:
            return  # abandoned meanwhile
        self._coordinator.submit([self._rollout(step, sample, turn, before.bounds, before.prompt + before.length)])

    def _scored(self, step: _Step, sample: Sample) -> None:
        if step.complete_s >= 0.0 or self._rollouts.pop(sample, None) is None:
            return
        step.ends.append(self._time.now)
        change = step.round.ended(sample)
        self._abandon(step, change.abandon)
        if change.complete:
            step.complete_s = self._time.now
        self._train()

    def _abandon(self, step: _Step, samples: Sequence[Sample]) -> None:
        gone = []
        for sample in samples:
            self._waiting.pop(sample, None)
            rollout = self._rollouts.pop(sample, None)
            if rollout is not None and self._live.pop(rollout.rollout_id, None) is not None:
                gone.append(rollout)
        if gone:
            self._coordinator.cancel(gone)

    # The trainer.

    def _train(self) -> None:
        """Learn from what there is, as the terms allow, unless the trainer is busy."""
        step = self._steps.get(self._next_train)
        if step is None or self._training is not None:
            return
        complete = step.complete_s >= 0.0
        tokens = step.tokens - step.learnt
        if not complete and not (self.terms.streamed and tokens):
            return
        self._training, step.learnt = step, step.tokens
        self._show("training")
        self._phase("training")
        seconds = self._learning.learn_s(tokens, len(step.ends)) + (self._learning.update_s() if complete else 0.0)
        self._time.after(seconds, lambda: self._trained(step, last=complete))

    def _trained(self, step: _Step, *, last: bool) -> None:
        if not last:
            self._freed()
            return
        now = self._time.now
        self._record(step, now)
        del self._steps[step.number]
        self._next_train = step.number + 1
        self._time.after(self._learning.publish_s(), lambda: self._published(step.number + 1))

    def _published(self, step: int) -> None:
        checkpoint_s = self._learning.checkpoint_s(step)
        self.done = step >= self.terms.steps
        if not self.done:
            self._announce(step)
        self._time.after(checkpoint_s, self._freed)

    def _freed(self) -> None:
        self._training = None
        self._show("idle")
        self._phase("idle")
        self._train()

    def _record(self, step: _Step, now: float) -> None:
        ends = sorted(step.ends)
        tail_from = ends[max(0, int(0.9 * len(ends)) - 1)]
        self._books.steps.append(
            StepOutcome(
                run=self.terms.name,
                step=step.number,
                opened_s=step.opened_s,
                generated_s=ends[-1],
                trained_s=now,
                rollouts=len(ends),
                tokens=step.tokens,
                tail_s=ends[-1] - tail_from,
            )
        )

    def _show(self, state: str) -> None:
        for machine in range(self.terms.trainer_machines):
            name = f"{self.terms.name} trainer {machine}"
            self._books.enter(name, f"{self.terms.name} trainer", state, self._time.now, self.terms.name)
