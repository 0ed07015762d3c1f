"""Defines what policies that divide rollouts have in common: a pool of keys and values, and modelled speculation."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from benchmarks.rivals.tail.kv_pool import KvPool
from benchmarks.rivals.tail.speculation_pace import SpeculationPace
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import Factor
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

Pause: TypeAlias = Annotated[float, Meta(gt=0, le=60)]
#: Speculation adapts once in so many rounds.
PACED_ROUNDS: Final = 5.0
#: A link of 8 x 400 Gbit/s and Qwen2-VL-72B's 320 KiB of keys and values for a token.
POOL_TOKENS_PER_S: Final = 1.2e6


class DividedPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each policy adds its decider."""

    speculates: bool = True
    verification: Factor = 1.0  # what draft tokens cost, as a multiple of the profile's
    pool_tokens_per_s: Annotated[float, Meta(ge=0)] = POOL_TOKENS_PER_S  # 0: no pool, so tokens are read again
    round_s: Pause = 2.0  # the least pause between two decisions

    @property
    def stream_batch(self) -> int | None:
        return None

    def pool(self) -> KvPool | None:
        return KvPool(tokens_per_s=self.pool_tokens_per_s) if self.pool_tokens_per_s else None

    def pace(self, coordinator: VirtualCoordinator) -> SpeculationPace | None:
        """What drafts do to engines' speeds; None without speculation."""
        if not self.speculates:
            return None
        every_s = PACED_ROUNDS * self.round_s
        return SpeculationPace(coordinator, verification=self.verification, every_s=every_s)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
