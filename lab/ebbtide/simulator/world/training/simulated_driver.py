"""Plays a run's driver: it submits the turns of each step's samples, scores responses, and says when a step has enough.

`RewardLimits` decides how long a scoring may take, as it does live. A scoring that would last longer than the ceiling
is one that never ends; shorter ones are of right answers.

Invariant of `SimulatedScoring`: at most `scorers` scorings run. Those that wait are in the order of arrival.

Invariant of `SimulatedDriver`: an episode of `_episodes` has a rollout that the coordinator knows, or its environment
is at work. `open_steps` and `training_bounds` decide what may be submitted, as they do live.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from msgspec import Struct

from ebbtide.simulator.scenario.training_run import SimulatedRewards
from ebbtide.simulator.scenario.workload import Turn
from ebbtide.simulator.world.training.step_rounds import RoundChange, Rounds, Sample, StepRound
from ebbtide.simulator.world.virtual_coordinator import SimulatedRollout
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.step_pacing import VersionBounds, continued, open_steps, training_bounds


class WaitingScoring(Struct, eq=False):
    """A response that has ended."""

    step: int
    takes_s: float
    scored: Callable[[], None]


class SimulatedScoring:
    def __init__(self, rewards: SimulatedRewards, time: VirtualTime) -> None:
        self._time, self._after = time, rewards.when == "after"
        self._free = rewards.scorers or inf
        self._limit_s = rewards.timeout_s or inf
        self._held: dict[int, list[WaitingScoring]] = {}  # by step, where all its responses are scored together
        self._queue: deque[WaitingScoring] = deque()

    def score(self, scoring: WaitingScoring, *, generating: Callable[[], bool]) -> None:
        """Scores a response once there is room; where the run scores behind its rollout, once none of its step is
        `generating`."""
        if self._after:
            self._held.setdefault(scoring.step, []).append(scoring)
            if not generating():
                self._all_ended(scoring.step)
            return
        self._queue.append(scoring)
        self._begin()

    def _all_ended(self, step: int) -> None:
        self._queue += self._held.pop(step, ())
        self._begin()

    def _begin(self) -> None:
        while self._queue and self._free > 0:
            self._free -= 1
            self._run(self._queue.popleft())

    def _run(self, scoring: WaitingScoring) -> None:
        took_s = min(scoring.takes_s, self._limit_s)

        def ended() -> None:
            self._free += 1
            scoring.scored()
            self._begin()

        if took_s > 0.0:
            self._time.after(took_s, ended)
        else:
            ended()


class StepProgress(Struct, eq=False):
    """One step, as far as its rollouts have come."""

    number: int
    opened_s: float
    ends: list[float] = []  # when its episodes got their rewards
    lengths: list[int] = []  # of those that may be trained on, prompts included
    learnt: int = 0  # of `lengths`: gradients are computed, or being computed
    responses: dict[int, list[int]] = {}  # of those the responses, by prompt
    tokens: int = 0  # of their responses
    complete: bool = False  # it has all that it trains on


class _Episode(Struct, eq=False):
    """One sample of a step, on its way."""

    progress: StepProgress
    round: StepRound
    sample: Sample
    turns: Sequence[Turn]
    begun: int  # the step that began it
    at: int = 0  # the turn that runs, or that its environment prepares
    tokens: int = 0
    rollout: SimulatedRollout | None = None  # None: the environment is at work


class DriversCoordinator(Protocol):
    """What a driver asks of the coordinator."""

    def submit(self, rollouts: Sequence[SimulatedRollout]) -> None: ...

    def cancel(self, rollouts: Sequence[SimulatedRollout]) -> None: ...


class SimulatedDriver:
    def __init__(
        self,
        run: str,
        *,
        steps: int,
        max_staleness: int,
        time: VirtualTime,
        coordinator: DriversCoordinator,
        rounds: Rounds,
        turns: Callable[[Sample], Sequence[Turn]],
        scoring: SimulatedScoring,
        opened: Callable[[StepProgress], None],
        scored: Callable[[StepProgress], None],
    ) -> None:
        """`turns`: an episode's turns; `opened` hears of each step, `scored` of each reward in it."""
        self._run, self._last = run, steps
        self._max_staleness = 0 if rounds.goes_on else max_staleness
        self._time, self._coordinator, self._rounds = time, coordinator, rounds
        self._turns, self._opened, self._scored = turns, opened, scored
        self._scoring = scoring
        self._versions: dict[int, int] = {}  # step -> version
        self._next = self._place = 0
        self._live: dict[str, _Episode] = {}  # by rollout
        self._late: list[int] = []  # tokens of episodes that ended between two steps
        self._whole: dict[Sample, int] = {}  # of samples that wait to be trained on: tokens, prompts included
        self._episodes: dict[Sample, _Episode] = {}

    @property
    def open_rollouts(self) -> int:
        return len(self._live)

    def announced(self, version: int, step: int) -> None:
        """Submit the steps that a new version opens."""
        self._versions[step] = version
        for number in open_steps(self._versions, steps=self._last, max_staleness=self._max_staleness):
            if number >= self._next:
                self._next = number + 1
                self._open(number)

    def _open(self, number: int) -> None:
        if self._rounds.goes_on:
            bounds = continued(self._versions, step=number)
        else:
            bounds = training_bounds(self._versions, step=number, max_staleness=self._max_staleness)
        progress, around = StepProgress(number, self._time.now), self._rounds.open(number)
        if self._rounds.goes_on:
            progress.ends += [self._time.now] * len(self._late)
            progress.tokens += sum(self._late)
            self._late.clear()
            for one in self._episodes.values():
                one.progress, one.round = progress, around
        episodes = [_Episode(progress, around, sample, self._turns(sample), number) for sample in around.begin()]
        self._episodes.update((one.sample, one) for one in episodes)
        self._opened(progress)
        self._coordinator.submit([self._rollout(one, bounds) for one in episodes])
        if self._rounds.goes_on:
            self._note(progress, around.carried())

    def _rollout(self, episode: _Episode, bounds: VersionBounds) -> SimulatedRollout:
        run, sample, turn = self._run, episode.sample, episode.turns[episode.at]
        name = f"{run}.{episode.begun}.{sample.prompt}.{sample.sample}"
        rollout = SimulatedRollout(
            rollout_id=f"{name}.{episode.at}",
            episode_id=name,
            run=run,
            step=episode.begun,
            group=sample.prompt,
            bounds=bounds,
            prompt=turn.prompt,
            length=turn.response,
            prefix=f"{run}.{sample.prompt}",
            after=tuple(f"{name}.{turn}" for turn in reversed(range(episode.at))),
            place=self._place,
        )
        self._place += 1
        self._live[rollout.rollout_id] = episode
        episode.rollout = rollout
        return rollout

    def ended(self, rollout: SimulatedRollout) -> None:
        """A rollout has ended: its environment takes its step, or gives the reward."""
        episode = self._live.pop(rollout.rollout_id)
        wait_s = episode.turns[episode.at].wait_s
        episode.tokens += rollout.length
        episode.at, episode.rollout = episode.at + 1, None
        if episode.at == len(episode.turns):
            self._score(episode, wait_s)
        elif wait_s > 0.0:
            self._time.after(wait_s, lambda: self._go_on(episode, rollout.bounds))
        else:
            self._go_on(episode, rollout.bounds)

    def _score(self, episode: _Episode, takes_s: float) -> None:
        step = episode.progress.number
        waiting = WaitingScoring(step, takes_s, lambda: self._rewarded(episode))
        self._scoring.score(waiting, generating=lambda: self._generating(step))

    def _generating(self, step: int) -> bool:
        """Whether an episode of the step has a response to come."""
        return any(one.progress.number == step and one.at < len(one.turns) for one in self._episodes.values())

    def _go_on(self, episode: _Episode, bounds: VersionBounds) -> None:
        if self._episodes.get(episode.sample) is episode:  # else it was abandoned meanwhile
            self._coordinator.submit([self._rollout(episode, bounds)])

    def _rewarded(self, episode: _Episode) -> None:
        if self._episodes.get(episode.sample) is not episode:
            return
        del self._episodes[episode.sample]
        progress = episode.progress
        if progress.complete:  # of a round that goes on: the next step counts it
            self._late.append(episode.tokens)
        else:
            progress.ends.append(self._time.now)
            progress.tokens += episode.tokens
        sample, last = episode.sample, episode.turns[-1]
        self._whole[sample] = last.prompt + last.response
        progress.responses.setdefault(sample.prompt, []).append(last.response)
        change = episode.round.ended(sample)
        self._note(progress, change if change.trainable is not None else change._replace(trainable=(sample,)))

    def _note(self, progress: StepProgress, change: RoundChange) -> None:
        """Take in what follows for a step."""
        progress.lengths += [self._whole.pop(one) for one in change.trainable or ()]
        self._abandon(change.abandon)
        progress.complete = change.complete
        self._scored(progress)

    def _abandon(self, samples: Sequence[Sample]) -> None:
        gone = []
        for sample in samples:
            self._whole.pop(sample, None)
            episode = self._episodes.pop(sample, None)
            if episode is not None and episode.rollout is not None:
                del self._live[episode.rollout.rollout_id]
                gone.append(episode.rollout)
        if gone:
            self._coordinator.cancel(gone)
