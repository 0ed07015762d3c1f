"""Over-provisions short rounds and runs what they leave in long ones, as RollPacker does (NSDI'26, section 4.1)."""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import ceil
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import IDLE_POLL_S, RivalDecider, fits
from ebbtide.simulator.world.training.step_rounds import RoundChange, Rounds, Sample, StepRound
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

Excess: TypeAlias = Annotated[float, Meta(ge=1.0, le=16.0)]


class TailBatching(Rounds):
    """Rounds of P0 prompts and R0 responses each. A short one starts with more of both, and defers the prompts that are
    not done when P0 are. Once P0 prompts are deferred, a long round runs them whole, without any excess.

    Invariant: a prompt is in `_deferred` or in the round of the present step, or was trained, or has not begun.
    """

    def __init__(self, prompts: int, group: int, *, prompt_excess: float, response_excess: float) -> None:
        self._prompts, self._group = prompts, group
        self._started = ceil(prompts * prompt_excess - 1e-9)
        self._responses = ceil(group * response_excess - 1e-9)
        self._deferred = deque[int]()
        self._fresh = 0

    def open(self, step: int) -> StepRound:
        del step
        if len(self._deferred) >= self._prompts:
            again = [self._deferred.popleft() for _ in range(self._prompts)]
            # What they had made was dropped: their responses are drawn anew.
            return _Race(again, self._responses, self._group, self._group, self._prompts, self._deferred)
        first, self._fresh = self._fresh, self._fresh + self._started
        prompts = range(first, first + self._started)
        return _Race(prompts, 0, self._responses, self._group, self._prompts, self._deferred)

    def deferred(self) -> Sequence[int]:
        """Prompts that wait for a long round, the oldest first."""
        return tuple(self._deferred)


class _Race(StepRound):
    """A round in which a prompt is done with its `enough`-th response, and the step with its `wanted`-th prompt."""

    def __init__(
        self, prompts: Sequence[int], first: int, responses: int, enough: int, wanted: int, deferred: deque[int]
    ) -> None:
        self._open = {prompt: [Sample(prompt, first + one) for one in range(responses)] for prompt in prompts}
        self._enough, self._wanted, self._deferred = enough, wanted, deferred
        self._ended: dict[int, list[Sample]] = {prompt: [] for prompt in prompts}

    def begin(self) -> Sequence[Sample]:
        return [sample for samples in self._open.values() for sample in samples]

    def ended(self, sample: Sample) -> RoundChange:
        self._open[sample.prompt].remove(sample)
        kept = self._ended[sample.prompt]
        kept.append(sample)
        if len(kept) < self._enough:
            return RoundChange(trainable=())
        abandoned = self._open.pop(sample.prompt)
        self._wanted -= 1
        if self._wanted:
            return RoundChange(abandoned, trainable=kept)
        self._deferred.extend(self._open)
        for left in self._open.values():
            abandoned += left
        return RoundChange(abandoned, complete=True, trainable=kept)


class FewestResponses(RivalDecider):
    """Each response goes at once to the engine that has the fewest unfinished ones, whatever its group: the public code
    (Farrrrland/RollPacker, `generate_scheduler.py`) submits every response on its own.
    """

    poll_s = IDLE_POLL_S

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        del now
        loads = [(len(engine.attempts), at) for at, engine in enumerate(engines)]
        heapify(loads)
        placements = []
        for one in run.queue:
            if fits(one, engines[0], run):
                load, at = loads[0]
                heapreplace(loads, (load + 1, at))
                placements.append(Placement(one.rollout_id, engines[at].session_id))
        return placements


class RollPackerPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RollPacker's tail batching over co-located engines, with responses dealt by `FewestResponses`. Aborted responses
    begin again from zero tokens, as on-policy training wants.

    It is not told lengths or tokens made: a response counts when its reward is there. Its planner of parallelism, its
    scaling down of engines within a step and its judges that share devices are not modelled.
    """

    prompt_excess: Excess = 1.25  # eta of prompts
    response_excess: Excess = 1.25  # eta of responses

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return FewestResponses(coordinator, keeps=False)

    def rounds(self, run: TrainingRun) -> Rounds:
        excess = {"prompt_excess": self.prompt_excess, "response_excess": self.response_excess}
        return TailBatching(run.prompts, run.group, **excess)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
