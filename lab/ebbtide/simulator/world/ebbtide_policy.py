"""Has the coordinator's own rounds decide: the policy that Ebbtide is."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from ebbtide.coordinator.dispatch.dispatch_round import DispatchRound, SlotFill, gather_s
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters, RunFailure
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.driver.group_rounds import MOST_EXCESS, GroupRounds
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import ContinuedRounds, Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: Steps of a run that goes on until the scenario's end.
_ENDLESS: Final = 1 << 40


class EbbtideDecider(Decider):
    """`balance`: rollouts move between workers; `keeps`: what a lost worker had stored goes on elsewhere."""

    def __init__(self, coordinator: VirtualCoordinator, *, balance: bool = True, keeps: bool = True) -> None:
        self.coordinator, self.keeps = coordinator, keeps
        settings = coordinator.settings
        self._rounds = DispatchRound(
            coordinator.state,
            coordinator.trust,
            lambda _: b"",
            coordinator.run_events,
            timeslice_s=settings.timeslice_s,
            balance=balance and settings.rebalance,
            interactive_slots=settings.interactive_slots,
        )

    def round(self, now: float) -> float:
        for action in self._rounds.steps(now):
            match action:
                case SlotFill():
                    while action.due(now) and (placements := action.place(now)):
                        self.coordinator.start(action.run, placements)
                        action.note_turn(0.0, now)
                case DeadLetters(run, letters):
                    self.coordinator.fail(run, letters)
                case RunFailure(run, message):
                    raise RuntimeError(f"run {run.run_id} failed: {message}")
                case None:
                    pass
        return self._rounds.pause_s(now)

    def speed(self, session: WorkerSession) -> tuple[WorkerThroughput | None, float]:
        """A worker's learnt speed, if any, and the mean context of its rollouts."""
        return self._rounds.speed(session)

    def gather_s(self) -> float:
        return gather_s(len(self.coordinator.state.sessions))


class EbbtidePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ebbtide as it is: the live coordinator's own rounds. It is not told lengths or the fleet's future."""

    #: As `rounds` of a run's `[tail]`. With `"whole_groups"` the run's `max_staleness` must be at least 1.
    rounds_of_steps: Literal["off", "whole_groups"] = "off"
    rounds_excess: Annotated[float, Meta(ge=1, le=MOST_EXCESS)] = 2.0  # as `rounds_excess` of a run's `[tail]`

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return EbbtideDecider(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        if self.rounds_of_steps == "off":
            return WholeGroups(run.prompts, run.group)
        if run.max_staleness < 1:
            raise InvalidRequest(
                "must be at least 1: groups that continue are trained later", field="run.max_staleness"
            )
        steps = run.steps or _ENDLESS
        terms = {"groups_per_step": run.prompts, "steps": steps, "max_age": run.max_staleness}
        return ContinuedRounds(GroupRounds(**terms, excess=self.rounds_excess), run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:  # noqa: ARG002 - it is fixed
        return FixedWindow(lent.window_s)
