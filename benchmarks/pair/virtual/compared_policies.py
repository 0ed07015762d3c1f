"""Names the policies that may decide about a served device: ours, and those that it is compared with.

    alone          rollouts never run
    unguarded      rollouts always run
    idle-only      our governor without sharing: rollouts run in idle time only
    rose:SETTING   ROSE's policy as reported; SETTING is STEP_S,WATERMARK,HEADROOM,HELD
    ours           our governor; `ours:AIM` sets how much of the room below the TPOT target it may use

All see the same calls of the guard. What a rival is not told stands in its module.
"""

from functools import partial

from msgspec.structs import replace

from benchmarks.pair.rivals.rose_policy import RoseAdmission, RoseMemory, RoseSetting, RoseTables
from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.serving_policies import ALONE, OURS, UNGUARDED, ServingPolicy
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets, StepLimits
from ebbtide.serving_guard.governor.governor import Governor
from ebbtide.serving_guard.memory_budget import MemoryBudget

KNOWN = ("alone", "unguarded", "idle-only", "rose", "ours")


def serving_policy(name: str, costs: PairCosts) -> ServingPolicy:
    """The policy of this name; ROSE's offline tables are the costs. Raises `InvalidRequest` for an unknown one."""
    kind, _, setting = name.partition(":")
    plain = {one.name: one for one in (ALONE, UNGUARDED, OURS)}
    if name in plain:
        return plain[name]
    if name == "idle-only":
        return ServingPolicy(name=name, decider=partial(_governor, 0.0), memory=MemoryBudget)
    if kind == "ours":
        return ServingPolicy(name=name, decider=partial(_governor, _aim(setting)), memory=MemoryBudget)
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


def _governor(aim: float, targets: LatencyTargets, limits: StepLimits) -> Governor:
    return Governor(replace(targets, aim_tpot=aim), limits)


def _aim(text: str) -> float:
    try:
        aim = float(text)
    except ValueError:
        aim = -1.0
    if not 0.0 <= aim <= 1.0:
        raise InvalidRequest(f"ours:{text}: give a number from 0 to 1", field="policy")
    return aim
