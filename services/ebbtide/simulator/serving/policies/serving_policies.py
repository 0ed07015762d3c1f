"""Names the policies that may decide about a served device: ours, and those that it is compared with.

    alone          rollouts never run
    unguarded      rollouts always run
    idle-only      our governor without sharing: rollouts run in idle time only
    rose:SETTING   ROSE's policy as reported; SETTING is STEP_S,WATERMARK,HEADROOM,HELD
    ours           our governor; `ours:AIM` sets how much of the room below the TPOT target it may use

All see the same calls of the guard. What a rival is not told stands in its module.
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.scheduling.coserving.budget_decider import BudgetDecider, LatencyTargets, StepLimits
from ebbtide.scheduling.coserving.governor import Governor
from ebbtide.serving_guard.loans.memory_budget import MemoryBudget
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.policies.constant_policy import ConstantBudget, ConstantMemory
from ebbtide.simulator.serving.policies.rose_policy import RoseAdmission, RoseMemory, RoseSetting, RoseTables
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.rollout_batch import RolloutShape
from ebbtide.simulator.serving.serving_pair import PairObserver, ServingPair

KNOWN = ("alone", "unguarded", "idle-only", "rose", "ours")


class ServingPolicy(Struct, frozen=True, kw_only=True):
    """Makes the two deciders of one guard."""

    name: str
    decider: Callable[[LatencyTargets, StepLimits], BudgetDecider]
    memory: Callable[..., MemoryBudget]  # called as `serving_guard.service.serve` calls it
    aborts: bool = False  # a cut of memory aborts rollouts whole
    lends: bool = True

    def play(
        self,
        requests: Sequence[TrafficRequest],
        costs: PairCosts,
        targets: LatencyTargets,
        *,
        seed: int,
        shape: RolloutShape | None = None,
        observer: PairObserver | None = None,
    ) -> ServingPair:
        """A pair under this policy that is ready to run."""
        memory = costs.memory
        limits = StepLimits(
            tokens=costs.step_tokens if self.lends else 0, sequences=max(costs.slots, 1) if self.lends else 0
        )
        divides = self.memory(
            limit_mib=memory.limit_mib,
            serving_kv_mib=min(memory.serving_kv_mib, memory.limit_mib) if memory.limit_mib else memory.serving_kv_mib,
            bytes_per_token=memory.served_token_bytes,
        )
        return ServingPair(
            requests,
            costs,
            self.decider(targets, limits),
            memory=divides,
            aborts=self.aborts,
            shape=shape,
            seed=seed,
            observer=observer,
        )


def serving_policy(name: str, costs: PairCosts) -> ServingPolicy:
    """The policy of this name; ROSE's offline tables are the costs. Raises `InvalidRequest` for an unknown one."""
    kind, _, setting = name.partition(":")
    if kind in ("alone", "unguarded") and not setting:
        return ServingPolicy(name=name, decider=ConstantBudget, memory=ConstantMemory, lends=kind == "unguarded")
    if kind == "idle-only" and not setting:
        return ServingPolicy(name=name, decider=partial(_governor, 0.0), memory=MemoryBudget)
    if kind == "ours":
        aim = _aim(setting) if setting else None
        return ServingPolicy(name=name, decider=partial(_governor, aim), memory=MemoryBudget)
    if kind == "rose":
        chosen, more_s = RoseSetting.parse(setting), costs.decode_each_s
        tables = RoseTables(
            prefill_s=costs.prefill_s,
            prefill_token_s=costs.prefill_token_s,
            decode_s=costs.decode_s + more_s,
            decode_more_s=more_s,
        )
        return ServingPolicy(
            name=name,
            decider=partial(RoseAdmission, setting=chosen, tables=tables),
            memory=partial(RoseMemory, chosen),
            aborts=True,
        )
    raise InvalidRequest(f"{name!r} is none of {', '.join(KNOWN)}", field="policy")


def _governor(aim: float | None, targets: LatencyTargets, limits: StepLimits) -> Governor:
    return Governor(targets if aim is None else replace(targets, aim_tpot=aim), limits)


def _aim(text: str) -> float:
    try:
        aim = float(text)
    except ValueError:
        aim = -1.0
    if not 0.0 <= aim <= 1.0:
        raise InvalidRequest(f"ours:{text}: give a number from 0 to 1", field="policy")
    return aim
