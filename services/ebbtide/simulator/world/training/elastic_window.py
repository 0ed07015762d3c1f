"""Has Ebbtide's own planner decide for how long a trainer's devices generate: shows it the coordinator's state.

It knows what a live coordinator does: what is stored of each rollout, what ended, learnt speeds, and how long gradients
took.

Invariant: `_step` is the step under way, once it was opened.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.elastic.closed_window import ClosedWindow
from ebbtide.scheduling.elastic.engine_pace import EnginePace, fitted_pace
from ebbtide.scheduling.elastic.step_window import SOONEST_S, StepWindow, TrainedStep, TrainerStep
from ebbtide.simulator.engines.engine_profile import EngineDelays
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.draws.machine_events import pool_of
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.work_left import FULL_AFTER_S, OpenGroup, WorkLeft

#: Engines whose speeds stand for all.
_SPEEDS: Final = 16
_UNKNOWN: Final = EnginePace(step_s=0.0, rollout_s=0.0)


class ElasticWindow(LoanWindow):
    """`lent`: the pool of the trainer's engines, so many of them as `engines`; `releases`: spot engines that are too
    many are given back, one after each step.
    """

    def __init__(
        self,
        decider: EbbtideDecider,
        lent: str,
        engines: int,
        *,
        releases: bool = False,
        form: Callable[[], StepWindow | ClosedWindow] = StepWindow,
    ) -> None:
        self._decider, self._lent, self._engines, self._releases = decider, lent, engines, releases
        self._state = decider.coordinator.state
        self.window = form()
        self._step: StepProgress | None = None
        self._groups_before = 0  # of the last step that was trained
        self._spare = False  # one engine elsewhere is too many in the step under way

    def opened(self, step: StepProgress) -> None:
        self._step, self._spare = step, False

    def lends(self) -> bool:
        run = self._run()
        if self._step is None or run is None or not self._groups_before:
            return True
        left, step = self._seen(run, self._step, coming=self._groups_before)
        lends = self.window.lends(left, step)
        self._spare = self._releases and bool(self.window.surplus(left, step))
        return lends

    def open_s(self) -> float | None:
        return SOONEST_S

    def extend_s(self) -> float:
        run = self._run()
        if self._step is None or run is None:
            return SOONEST_S
        return self.window.look_s(*self._seen(run, self._step))

    def closed(self) -> None:
        run = self._run()
        if self._step is not None and run is not None:
            self.window.closed(self._state.clock(), *self._seen(run, self._step))

    def surplus(self) -> str | None:
        spots = [one for one in self._state.sessions.values() if one.hello.kind is WorkerKind.SPOT]
        if not self._spare or len(spots) < 2:
            return None
        self._spare = False
        return min(spots, key=lambda one: len(one.attempts)).worker_id

    def lends_again(self) -> bool:
        run = self._run()
        if self._step is None or run is None:
            return False
        return self.window.lends_again(self._state.clock(), *self._seen(run, self._step))

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        progress, run = self._step, self._run()
        if progress is None or run is None:
            return
        groups = list(progress.responses.values())
        prompt = round((sum(progress.lengths) - progress.tokens) / max(1, len(progress.lengths)))
        left, seen = self._seen(run, progress)
        self.window.trained(
            TrainedStep(
                prompts=[prompt] * len(groups), responses=groups, learning_s=learning_s, generated_at=step.generated_s
            ),
            left,
            seen.local,
        )
        self._groups_before = len(groups)

    # What the planner is shown.

    def _run(self) -> RunState | None:
        return next(iter(self._state.runs.values()), None)

    def _seen(self, run: RunState, step: StepProgress, *, coming: int = 0) -> tuple[WorkLeft, TrainerStep]:
        """`coming`: groups of a step that is not submitted yet. Devices without an attached engine have one that is
        asleep.
        """
        sessions = list(self._state.sessions.values())
        mine = [one for one in sessions if self._is_local(one)]
        asleep = tuple(f"{self._lent} asleep {at}" for at in range(self._engines - len(mine)))
        prompts, groups = (frozenset[int](), []) if coming else self._groups(run, step)
        delays = self._delays(mine)
        names = (*(one.worker_id for one in sessions), *asleep)
        pace, full = self._pace(sessions), self._full(sessions)
        left = WorkLeft(
            groups=tuple(groups),
            open=len(groups),
            newest=run.newest,
            engines=names,
            speeds=(1.0,) * len(names),
            versions=(*(one.version_of(run.run_id) for one in sessions), *(run.newest for _ in asleep)),
            rollouts=(*(len(one.attempts) for one in sessions), *(0 for _ in asleep)),
            lent=(*(True for _ in sessions), *(False for _ in asleep)),
            spot=(*(one.hello.kind is WorkerKind.SPOT for one in sessions), *(False for _ in asleep)),
            shares=(1.0,) * len(names),
            fits=max((len(one.attempts) for one in sessions if not one.pending), default=0),
            full_rollouts=tuple(len(lengths) for lengths in full),
            full_tokens=tuple(sum(lengths) for lengths in full),
            step_s=pace.step_s,
            rollout_s=pace.rollout_s,
            context_s=pace.context_s,
        )
        return left, TrainerStep(
            missing=coming or len(groups),
            complete=len(step.responses.keys() - prompts),
            ready_tokens=sum(step.lengths[step.learnt :]),
            longest=run.spec.sampling.max_tokens,
            local=frozenset((*(one.worker_id for one in mine), *asleep)),
            on_s=delays.wake_s,
            off_s=delays.sleep_s,
        )

    def _pace(self, sessions: Sequence[WorkerSession]) -> EnginePace:
        speeds = [found for one in sessions if (found := self._decider.speed(one)[0]) is not None]
        points = list(chain.from_iterable(one.points() for one in speeds[:: -(-len(speeds) // _SPEEDS) or 1]))
        return fitted_pace(points) if points else _UNKNOWN

    def _delays(self, mine: Sequence[WorkerSession]) -> EngineDelays:
        coordinator = self._decider.coordinator
        return coordinator.worker(mine[0].session_id).terms.profile.delays if mine else EngineDelays()

    def _groups(self, run: RunState, step: StepProgress) -> tuple[frozenset[int], list[OpenGroup]]:
        """The prompts of groups that are not complete, and what is left of each."""
        running: dict[int, list[int]] = {}
        lent: dict[int, list[int]] = {}
        waiting: dict[int, list[int]] = {}
        prompts: dict[int, int] = {}
        for attempt in run.running.values():
            prompt = _prompt(attempt.rollout.episode_id)
            where = waiting if not attempt.started else lent if self._is_lent(attempt) else running
            where.setdefault(prompt, []).append(attempt.stored)
            prompts[prompt] = attempt.rollout.length - attempt.rollout.made
        for queued in run.queue:
            prompt = _prompt(queued.episode_id)
            waiting.setdefault(prompt, []).append(queued.made)
            prompts[prompt] = queued.length - queued.made
        groups = [
            OpenGroup(
                prompt=length,
                finished=tuple(step.responses.get(prompt, ())),
                running=(*lent.get(prompt, ()), *running.get(prompt, ())),
                lent=len(lent.get(prompt, ())),
                waiting=tuple(waiting.get(prompt, ())),
            )
            for prompt, length in sorted(prompts.items())
        ]
        return frozenset(prompts), groups

    def _full(self, sessions: Sequence[WorkerSession]) -> list[list[int]]:
        """Contexts in each engine in which a rollout waits, as `ReadWorkLeft` has them. An engine that fills the slots
        which it offers is none: they leave room for contexts to grow, so what it holds says less than it can hold.
        """
        now = self._state.clock()
        return [
            [attempt.length for attempt in one.attempts.values() if attempt.started]
            for one in sessions
            if max((now - waiting.given for waiting in one.pending.values()), default=0.0) > FULL_AFTER_S
            and len(one.attempts) > len(one.pending)
        ]

    def _is_lent(self, attempt: RunningAttempt) -> bool:
        return attempt.session is not None and self._is_local(attempt.session)

    def _is_local(self, session: WorkerSession) -> bool:
        return pool_of(session.worker_id) == self._lent


def _prompt(episode_id: str) -> int:
    """The prompt's number, from the third part of an episode's name."""
    return int(episode_id.split(".")[-2])
