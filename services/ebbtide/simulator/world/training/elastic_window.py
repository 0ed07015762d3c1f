"""Has Ebbtide's own planner decide for how long a trainer's devices generate: shows it the coordinator's state.

It knows what a live coordinator does: what is stored of each rollout, what ended, learnt speeds, and how long gradients
took.

Invariant: `_step` is the step under way, once it was opened.
"""

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Final

from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.elastic.engine_pace import fitted_pace
from ebbtide.scheduling.elastic.fading_quantiles import FadingQuantiles
from ebbtide.scheduling.elastic.group_lengths import GroupLeft
from ebbtide.scheduling.elastic.loan_view import LendableDevice, LoanPlan, LoanView
from ebbtide.scheduling.elastic.window_planner import WindowPlanner
from ebbtide.simulator.engines.engine_profile import EngineDelays
from ebbtide.simulator.outcome import StepOutcome
from ebbtide.simulator.scenario.draws.machine_events import pool_of
from ebbtide.simulator.world.ebbtide_policy import EbbtideDecider
from ebbtide.simulator.world.training.simulated_driver import StepProgress
from ebbtide.simulator.world.training.trainer_loan import LoanWindow
from ebbtide.types.fleet import WorkerKind

#: A window is decided again after this share of what is left of it, but neither sooner nor later than these bounds: the
#: nearer its end, the more it hangs on what is left.
_LOOK_SHARE: Final = 0.2
_SOONEST_S: Final = 1.0
_LATEST_S: Final = 10.0
#: Lending again is thought about so often, and only once an engine elsewhere was lost: as long as the fleet stays, the
#: window that just ended was the right one, and a better forecast is not worth another switch.
_AGAIN_S: Final = 5.0
#: Rollouts that an engine runs at once, until one was seen that runs more, or is full.
_BATCH: Final = 64.0
#: Loads of full engines that are remembered, and the quantiles that are taken for the most rollouts and tokens. Some
#: engines that are seen full have just lost a rollout, and others hold rollouts that they have put off.
_LOADS: Final = 256
_FULL: Final = 0.9
_FULL_TOKENS: Final = 0.5
#: An engine is full if a rollout has waited in it for so long; else it may just read prompts.
_WAITS_S: Final = 5.0
#: Engines whose speeds stand for all.
_SPEEDS: Final = 16
#: An engine prefills about so many tokens per second while it also decodes. Workers do not report it.
_READ_TOKENS_PER_S: Final = 20_000.0


class ElasticWindow(LoanWindow):
    """`lent`: the pool of the trainer's engines, so many of them as `engines`; `releases`: spot engines that are too
    many are given back, one after each step.
    """

    def __init__(self, decider: EbbtideDecider, lent: str, engines: int, *, releases: bool = False) -> None:
        self._decider, self._lent, self._engines, self._releases = decider, lent, engines, releases
        self._state = decider.coordinator.state
        self.planner = WindowPlanner()
        self._batch, self._held = FadingQuantiles(memory=_LOADS), FadingQuantiles(memory=_LOADS)
        self._fits = _BATCH  # rollouts that an engine was seen to run while none waited in it
        self._step: StepProgress | None = None
        self._plan: LoanPlan | None = None
        self._cut: tuple[float, float, frozenset[str]] | None = None  # when, the forecast of generation then, the fleet
        self._fleet = frozenset[str]()  # engines elsewhere when the devices were lent last
        self._asked_s = -inf
        self._expected: Sequence[GroupLeft] = ()  # groups like those of the last step
        self._spare = False  # one engine elsewhere is too many in the step under way

    def opened(self, step: StepProgress) -> None:
        self._step, self._spare = step, False

    def lends(self) -> bool:
        """By a plan for groups like those of the last step. A short window would spread each group over all engines and
        then cut them all: without one, those that run first stay whole.
        """
        view = self._view(self._expected)
        if view is None or not self._expected:
            return True
        self._plan = self.planner.plan(view)
        self._spare = self._releases and self.planner.surplus(view, 1.0)
        return self._plan.window_s > _SOONEST_S

    def open_s(self) -> float | None:
        return _SOONEST_S

    def extend_s(self) -> float:
        view = self._view()
        if view is None:
            return _SOONEST_S
        self._plan = plan = self.planner.plan(view)
        if plan.window_s <= 0.5 * _SOONEST_S:
            return 0.0
        return min(max(_LOOK_SHARE * plan.window_s, _SOONEST_S), _LATEST_S, plan.window_s)

    def closed(self) -> None:
        self._fleet = self._elsewhere()
        if self._plan is not None:
            self._cut = (self._state.clock(), self._plan.generated_s, self._elsewhere())

    def surplus(self) -> str | None:
        spots = [one for one in self._state.sessions.values() if one.hello.kind is WorkerKind.SPOT]
        if not self._spare or len(spots) < 2:
            return None
        self._spare = False
        return min(spots, key=lambda one: len(one.attempts)).worker_id

    def lends_again(self) -> bool:
        now = self._state.clock()
        if now - self._asked_s < _AGAIN_S:
            return False
        self._asked_s = now
        self._learn_batch(list(self._state.sessions.values()))  # engines elsewhere are full now, if ever
        lost = self._fleet - self._elsewhere()
        if not lost:
            return False
        view = self._view()
        if view is None or not self.planner.lends_again(view):
            return False
        self._fleet = self._elsewhere()
        return True

    def trained(self, step: StepOutcome, learning_s: float) -> None:
        progress = self._step
        if progress is None:
            return
        self.planner.trained(sum(progress.lengths), learning_s)
        self.planner.lengths.step_ended(progress.responses.values())
        if self._cut is not None:
            at_s, forecast_s, fleet = self._cut
            if fleet == self._elsewhere() and forecast_s < inf:
                self.planner.generated(forecast_s, step.generated_s - at_s)
        self._cut = None
        prompt = round((sum(progress.lengths) - progress.tokens) / max(1, len(progress.lengths)))
        cap = next((run.spec.sampling.max_tokens for run in self._state.runs.values()), 0)
        self._expected = [
            GroupLeft(prompt=prompt, waiting=[0] * len(lengths), cap=cap) for lengths in progress.responses.values()
        ]

    # What the planner is shown.

    def _view(self, expected: Sequence[GroupLeft] = ()) -> LoanView | None:
        """`expected`: the groups of a step that is not submitted yet. Engines elsewhere have its version soon."""
        runs, step = list(self._state.runs.values()), self._step
        if step is None or not runs:
            return None
        run, sessions = runs[0], list(self._state.sessions.values())
        prompts, groups = (frozenset[int](), expected) if expected else self._groups(run, step)
        ready = step.lengths[step.learnt :]
        remote = [one for one in sessions if not self._is_local(one)]
        speeds = [found for one in sessions if (found := self._decider.speed(one)[0]) is not None]
        speeds = speeds[:: -(-len(speeds) // _SPEEDS) or 1]
        self._learn_batch(sessions)
        return LoanView(
            groups=groups,
            ready_tokens=sum(ready),
            complete=len(step.responses.keys() - prompts),
            remote=float(len([one for one in remote if expected or one.version_of(run.run_id) == run.newest])),
            devices=self._devices(sessions),
            batch=max(self._fits, self._batch.quantile(_FULL) if self._batch.known else 0.0),
            kv_tokens=self._held.quantile(_FULL_TOKENS) if self._held.known else inf,
            pace=fitted_pace(list(chain.from_iterable(one.points() for one in speeds))),
            read_s=1.0 / _READ_TOKENS_PER_S,
        )

    def _devices(self, sessions: Sequence[WorkerSession]) -> list[LendableDevice]:
        mine = [one for one in sessions if self._is_local(one)]
        delays = self._delays(mine)
        held = {at: bool(one.attempts) for at, one in enumerate(mine)}
        return [
            LendableDevice(name=str(at), on_s=delays.wake_s, off_s=delays.sleep_s, busy=held.get(at, False))
            for at in range(self._engines)
        ]

    def _delays(self, mine: Sequence[WorkerSession]) -> EngineDelays:
        coordinator = self._decider.coordinator
        return coordinator.worker(mine[0].session_id).terms.profile.delays if mine else EngineDelays()

    def _groups(self, run: RunState, step: StepProgress) -> tuple[frozenset[int], list[GroupLeft]]:
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
            GroupLeft(
                prompt=length,
                finished=step.responses.get(prompt, ()),
                running=(*lent.get(prompt, ()), *running.get(prompt, ())),
                lent=len(lent.get(prompt, ())),
                waiting=waiting.get(prompt, ()),
                cap=run.spec.sampling.max_tokens,
            )
            for prompt, length in sorted(prompts.items())
        ]
        return frozenset(prompts), groups

    def _learn_batch(self, sessions: Sequence[WorkerSession]) -> None:
        """Engines in which rollouts wait run as many as they can. In the others so many as run do fit."""
        now = self._state.clock()
        for session in sessions:
            waits_s = max((now - one.given for one in session.pending.values()), default=0.0)
            running = [one.length for one in session.attempts.values() if one.started]
            if not session.pending:
                self._fits = max(self._fits, float(len(running)))
            elif waits_s > _WAITS_S and running:
                self._batch.observe(float(len(running)))
                self._held.observe(float(sum(running)))

    def _is_lent(self, attempt: RunningAttempt) -> bool:
        return attempt.session is not None and self._is_local(attempt.session)

    def _is_local(self, session: WorkerSession) -> bool:
        return pool_of(session.worker_id) == self._lent

    def _elsewhere(self) -> frozenset[str]:
        return frozenset(name for name, one in self._state.sessions.items() if not self._is_local(one))


def _prompt(episode_id: str) -> int:
    """The prompt's number, from the third part of an episode's name."""
    return int(episode_id.split(".")[-2])
