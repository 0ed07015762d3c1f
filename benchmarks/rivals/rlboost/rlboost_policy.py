"""Names what RLBoost does, and what of it comparisons leave out."""

from typing import Annotated, cast

from msgspec import Meta, Struct

from benchmarks.rivals.rlboost.climbing_window import ClimbingWindow
from benchmarks.rivals.rlboost.group_sweeps import GroupSweeps
from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from benchmarks.rivals.rlboost.seeding_window import SeedingWindow
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator


class RLBoostPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RLBoost as published (arXiv 2510.19225, section 4): remote engines beside a pool of kind "trainer", whose devices
    generate for a window, and a trainer that learns from what has ended.

    It is not told lengths, and of speeds only one table of throughput for all engines alike. It knows how many rollouts
    wait and run in each engine, and the tokens that were made. The paper gives no values for Theta, m_b, eta and
    T_init; those here are of its public code (Terra-Flux/PolyRL), m_b as its `min_stream_batch_size`. That code looks
    at all engines about once a second, and sends at most four groups between two looks. Theta is as many.
    """

    pending_limit: Annotated[int, Meta(ge=1, le=65_536)] = 32  # Theta
    sweep: Annotated[int, Meta(ge=1, le=65_536)] = 32  # rollouts that are sent between two looks
    micro_batch: Annotated[int, Meta(ge=1, le=65_536)] = 16  # m_b: the trainer waits for so many responses
    eta: Annotated[float, Meta(gt=0, le=100)] = 3.0
    initial_window_s: Annotated[float, Meta(ge=0, le=1e6)] = 150.0
    adapts: bool = True  # else the window is the pool's
    remembers: bool = True  # windows by the number of instances
    #: Windows that are remembered from the begin on, in seconds: with one instance, with two, and so on.
    windows: Annotated[str, Meta(pattern=r"^([0-9]+( [0-9]+)*)?$", max_length=1000)] = ""
    migrates: bool = True  # else lost rollouts begin again
    balances: bool = True  # rollouts move between engines; with `unit_groups` none does
    whole_groups: bool = False  # a micro-batch has whole groups only: GRPO's advantages need them
    climbs: bool = False  # the public code's window instead of the paper's
    unit_groups: bool = False  # whole groups are sent, and cut to their shortest response, as by the public code

    @property
    def stream_batch(self) -> int | None:
        return self.micro_batch

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        if self.unit_groups:
            return GroupSweeps(coordinator, keeps=self.migrates, sweep=self.sweep)
        return PendingBalance(
            coordinator,
            keeps=self.migrates,
            pending_limit=self.pending_limit,
            sweep=self.sweep,
            balance=self.balances,
        )

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group, together=self.whole_groups)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        placing = cast("PendingBalance", decider)
        placing.local = lent.name
        if not self.adapts:
            return FixedWindow(lent.window_s)
        known = {count: float(text) for count, text in enumerate(self.windows.split(), start=1)}
        if self.climbs:
            return ClimbingWindow(placing, eta=self.eta, initial_s=self.initial_window_s, table=known)
        return SeedingWindow(
            placing,
            lent.workers or 1,
            eta=self.eta,
            initial_s=self.initial_window_s,
            memory=known if self.remembers else None,
        )
