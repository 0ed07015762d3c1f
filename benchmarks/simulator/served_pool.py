"""States what the users that were measured beside a borrowed worker left it of the device, for a scenario."""

from typing import Final

import msgspec

from benchmarks.pair.virtual.grant_tape import grant_tape
from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.pair_costs_fit import MeasuredRequest, fit_served
from benchmarks.simulator.bound_fleet import SLOTS
from benchmarks.simulator.measured import Measured
from benchmarks.simulator.served_users import UsersRecord
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.scenario.input_tables import GrantTape

#: The scenario's name of the tape.
GRANTS: Final = "grants.csv"


def users_record(measured: Measured) -> UsersRecord:
    """Returns what was measured of the users. Raises `InvalidRequest` if the setting had none."""
    if measured.served is None:
        raise InvalidRequest("has no users: measure the setting again", field=measured.setting.name)
    return msgspec.convert(measured.served, UsersRecord)


def granted(users: UsersRecord, engine: EngineProfile, mean_context: float) -> GrantTape:
    """What the guard leaves rollouts beside these users, as a virtual pair plays it.

    `mean_context`: of a rollout, in tokens, prompt included. The costs of the served engine are fitted to the window
    that it served alone, those of rollouts are the profile's. While both compute, each has half of the core: the kernel
    divides it evenly between two processes.
    """
    costs = pair_costs(users, engine, mean_context)
    slo = LatencyTargets(ttft_s=users.ttft_s, tpot_s=users.tpot_s)
    *spells, (end_s, _) = grant_tape(users.requests, users.window_s, costs, slo)
    return GrantTape(tuple(at for at, _ in spells), tuple(share for _, share in spells), end_s)


def pair_costs(users: UsersRecord, engine: EngineProfile, mean_context: float) -> PairCosts:
    """The costs of both engines alone."""
    costs = engine.costs
    pair = PairCosts(
        source="the served engine alone, and profile blocks of this session",
        slots=SLOTS,
        step_tokens=engine.batched_tokens,
        step_s=costs.base_s,
        step_token_s=costs.token_s + costs.sequence_s + costs.context_s * mean_context,
    )
    alone = [
        MeasuredRequest(one.sent, one.first, one.last, one.prompt, one.output) for one in users.alone if not one.failed
    ]
    return fit_served([alone], pair)
