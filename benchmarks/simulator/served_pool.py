"""States the users that were measured beside a borrowed worker, and what both engines cost alone, for a scenario."""

from pathlib import Path
from typing import Final

import msgspec

from benchmarks.pair.virtual.pair_costs_fit import MeasuredRequest, fit_served, pair_costs_text
from benchmarks.simulator.bound_fleet import SLOTS
from benchmarks.simulator.measured import Measured
from benchmarks.simulator.served_users import UsersRecord
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.settings import Slo
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.scenario.inputs.served_trace import ServedTrace
from ebbtide.simulator.scenario.machine_pool import ServingSpec
from ebbtide.simulator.serving.pair_costs import PairCosts

#: The scenario's names of the users' requests and of the costs.
REQUESTS: Final = "users.csv"
_COSTS: Final = "pair.toml"


def users_record(measured: Measured) -> UsersRecord:
    """Returns what was measured of the users. Raises `InvalidRequest` if the setting had none."""
    if measured.served is None:
        raise InvalidRequest("has no users: measure the setting again", field=measured.setting.name)
    return msgspec.convert(measured.served, UsersRecord)


def served_trace(users: UsersRecord) -> ServedTrace:
    """Returns the requests of one window. The scenario repeats them, as the measurement did."""
    found = users.requests
    return ServedTrace(
        tuple(one.at for one in found), tuple(one.prompt for one in found), tuple(one.output for one in found)
    )


def serving_spec(users: UsersRecord, engine: EngineProfile, mean_context: float, folder: Path) -> ServingSpec:
    """Writes the costs of both engines alone to `folder`. `mean_context`: of a rollout, in tokens, prompt included.

    The costs of the served engine are fitted to the window that it served alone, those of rollouts are the profile's.
    While both compute, each has half of the core: the kernel divides it evenly between two processes.
    """
    costs = engine.costs
    each_s = costs.token_s + costs.sequence_s + costs.context_s * mean_context
    pair = PairCosts(
        source="the served engine alone, and profile blocks of this session",
        slots=SLOTS,
        step_tokens=engine.batched_tokens,
        step_s=costs.base_s,
        step_token_s=each_s,
    )
    alone = [
        MeasuredRequest(one.sent, one.first, one.last, one.prompt, one.output) for one in users.alone if not one.failed
    ]
    (folder / _COSTS).write_text(pair_costs_text(fit_served([alone], pair)))
    return ServingSpec(
        costs=_COSTS,
        file=REQUESTS,
        span_s=users.window_s,
        alike=True,
        slo=Slo(ttft_ms=1e3 * users.ttft_s, tpot_ms=1e3 * users.tpot_s),
    )
