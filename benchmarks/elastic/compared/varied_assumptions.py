"""Tells how the ratios of throughput and money change with each assumption, by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.elastic.elastic_figures import CHURNY, SimulatedResult
from benchmarks.elastic.elastic_policies import CODE, CODE_KEEPS, OURS, PAPER, VERL
from benchmarks.elastic.elastic_setting import ElasticCase

#: What is simulated with other assumptions.
VARIED_POLICIES: Final = (OURS, PAPER, CODE, CODE_KEEPS, VERL)
#: The least ratios that are claimed: where the number of instances changes often, elsewhere, and beside verl's rule.
CLAIMED: Final = {PAPER: (1.02, 1.00), CODE: (1.10, 1.00), VERL: (1.05, 1.05)}


def assumption_table(results: Sequence[SimulatedResult], cases: Sequence[ElasticCase]) -> list[dict[str, Any]]:
    """A row for each case: what is not as usual, the ratios, and the claims that fail. `cases`: of the results."""
    rows: dict[ElasticCase, dict[str, SimulatedResult]] = {}
    for case, result in zip(cases, results, strict=True):
        rows.setdefault(case, {})[result.policy] = result
    return [_row(case, found) for case, found in rows.items() if OURS in found]


def _row(case: ElasticCase, found: Mapping[str, SimulatedResult]) -> dict[str, Any]:
    ours = found[OURS]
    rivals = {name: found[name] for name in VARIED_POLICIES if name in found and name != OURS}
    over = {name: round(ours.tokens_per_s / one.tokens_per_s, 4) for name, one in rivals.items()}
    return {
        "case": case.name,
        "steps": case.steps,
        "changed": round(ours.changed, 3),
        "instances": round(ours.instances, 2),
        "throughput_over": over,
        "money_over": {name: round(ours.tokens_per_dollar / one.tokens_per_dollar, 4) for name, one in rivals.items()},
        "claims_that_fail": failing(over, ours.changed),
    }


def failing(over: Mapping[str, float], changed: float) -> list[str]:
    """The rivals over which less is won than claimed. `changed`: share of the steps in which the fleet changed."""
    calm = changed < CHURNY
    return [name for name, least in CLAIMED.items() if name in over and over[name] < least[calm]]
