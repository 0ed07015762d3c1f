"""Makes figures of simulated cases: ratios of throughput and of tokens per money, of several cases the worst."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

from benchmarks.elastic.elastic_policies import COMPARED, ORACLE, OURS
from ebbtide.simulator.outcome import Outcome

#: A case counts as churny if the number of instances changes in so large a share of its steps.
_CHURNY: Final = 0.2
#: Other figures need live loans and engines, which this benchmark does not have.
_ELSEWHERE: Final = {
    "real_tokens_over_rose": "needs the real pair of engines",
    "switch_steps_p99": "needs loans of live devices",
    "mixed_fleet_over_oracle": "needs the placement for mixed fleets",
}


class SimulatedResult(Struct, frozen=True, kw_only=True):
    """What one policy came to in one case."""

    case: str
    policy: str
    tokens_per_s: float
    tokens_per_dollar: float
    step_s: Sequence[float]
    changed: float  # share of the steps in which the number of instances changed
    instances: float  # on average
    moved: int  # tokens that were read again after a cut, a move or a loss
    cpu_s: float


def result_of(case: str, policy: str, outcome: Outcome, cpu_s: float) -> SimulatedResult:
    """Sum up a simulation: all of its steps, with the first ones, in which policies learn."""
    ends = [outcome.steps[0].opened_s, *(step.trained_s for step in outcome.steps)]
    lasted_s = ends[-1] - ends[0]
    tokens = sum(step.tokens for step in outcome.steps)
    changes = [at for at, pool, _ in outcome.fleet if pool == "spot" and at > ends[0]]
    changed = sum(any(begin < at <= end for at in changes) for begin, end in pairwise(ends))
    spot_s = sum(pool.machine_s for pool in outcome.pools if pool.pool == "spot")
    return SimulatedResult(
        case=case,
        policy=policy,
        tokens_per_s=tokens / lasted_s,
        tokens_per_dollar=tokens / max(1e-9, sum(pool.cost for pool in outcome.pools)),
        step_s=[round(end - begin, 1) for begin, end in pairwise(ends)],
        changed=changed / len(outcome.steps),
        instances=spot_s / outcome.simulated_s,
        moved=outcome.tokens.moved,
        cpu_s=round(cpu_s, 1),
    )


def figures(results: Sequence[SimulatedResult], decision_ms: float, gradient_error: float) -> dict[str, Any]:
    """The worst over all cases; None where a policy was not simulated, with the reason under `skipped`."""
    cases = _by_case(results)
    churny = {case: found for case, found in cases.items() if OURS in found and found[OURS].changed >= _CHURNY}
    return {
        "throughput_over_rlboost_paper": _worst(churny, (_PAPER,), _throughput),
        "throughput_over_rlboost_code": _worst(churny, (_CODE,), _throughput),
        "throughput_over_verl_hybrid": _worst(cases, ("verl hybrid",), _throughput),
        "share_of_window_oracle": _worst(cases, (ORACLE,), _throughput),
        "tokens_per_money_over_best_baseline": _worst(cases, _BASELINES, lambda one: one.tokens_per_dollar),
        "real_tokens_over_rose": None,
        "streamed_gradient_error": gradient_error,
        "switch_steps_p99": None,
        "mixed_fleet_over_oracle": None,
        "decision_p99_ms": decision_ms,
    }


def further(results: Sequence[SimulatedResult]) -> dict[str, float | None]:
    """Ratios of throughput that are no figures: where the fleet seldom changes, and beside a rule that no GRPO trainer
    can follow, which computes gradients of samples whose groups are not complete.
    """
    cases = _by_case(results)
    calm = {case: found for case, found in cases.items() if OURS in found and found[OURS].changed < _CHURNY}
    return {
        "calm_over_rlboost_paper": _worst(calm, (_PAPER,), _throughput),
        "calm_over_rlboost_code": _worst(calm, (_CODE,), _throughput),
        "all_over_rlboost_paper_on_samples": _worst(cases, (_SAMPLES,), _throughput),
    }


def _by_case(results: Sequence[SimulatedResult]) -> dict[str, dict[str, SimulatedResult]]:
    cases: dict[str, dict[str, SimulatedResult]] = {}
    for one in results:
        cases.setdefault(one.case, {})[one.policy] = one
    return cases


def skipped(found: Mapping[str, Any]) -> dict[str, str]:
    """Why figures are None."""
    return {
        name: _ELSEWHERE.get(name, "no case has both policies, or none changes often enough")
        for name, value in found.items()
        if value is None
    }


#: A gradient of GRPO needs its whole group, and RLBoost sends and collects whole groups. So its micro-batches are taken
#: as made of whole groups, although the paper says responses.
_PAPER: Final = "rlboost paper"
_SAMPLES: Final = "rlboost paper, samples"
_CODE: Final = "rlboost code"
_BASELINES: Final = tuple(
    name for name, one in COMPARED.items() if one.on_policy and name not in (OURS, ORACLE, "fixed window")
)


def _throughput(one: SimulatedResult) -> float:
    return one.tokens_per_s


def _worst(
    cases: Mapping[str, Mapping[str, SimulatedResult]],
    rivals: Sequence[str],
    of: Callable[[SimulatedResult], float],
) -> float | None:
    """The least ratio of ours to the best of the rivals, over the cases that have both."""
    ratios = [
        of(found[OURS]) / max(of(found[rival]) for rival in rivals if rival in found)
        for found in cases.values()
        if OURS in found and any(rival in found for rival in rivals)
    ]
    return round(min(ratios), 4) if ratios else None
