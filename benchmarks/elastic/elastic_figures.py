"""Makes figures of simulated cases: ratios of throughput and of tokens per money, of several cases the worst."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from msgspec import Struct

from benchmarks.elastic.elastic_policies import CODE, CODE_KEEPS, COMPARED, ORACLE, OURS, PAPER, SAMPLES, VERL
from ebbtide.simulator.outcome import Outcome

#: A case counts as churny if the number of instances changes in so large a share of its steps.
CHURNY: Final = 0.2
#: RLBoost's paper has micro-batches of responses. A gradient of GRPO needs its whole group, so the rule on samples is
#: no baseline of a figure; it stands beside them.
_BASELINES: Final = tuple(
    name for name, one in COMPARED.items() if one.on_policy and one.counts and name not in (OURS, ORACLE, SAMPLES)
)


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
    changes = _changes(outcome)
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


def _changes(outcome: Outcome) -> list[float]:
    """When the number of instances became another one. One that is replaced in the instant of its loss changes none."""
    last, found = 0, list[float]()
    spot = ((at, count) for at, pool, count in outcome.fleet if pool == "spot")
    for at, counts in groupby(spot, key=lambda one: one[0]):
        *_, (_, count) = counts
        if count != last and at > outcome.steps[0].opened_s:
            found.append(at)
        last = count
    return found


def figures(results: Sequence[SimulatedResult]) -> dict[str, float | None]:
    """The worst over all cases; None where no case has the policies that are compared."""
    cases = _by_case(results)
    churny = {case: found for case, found in cases.items() if OURS in found and found[OURS].changed >= CHURNY}
    return {
        "throughput_over_rlboost_paper": _worst(churny, (PAPER,), _throughput),
        "throughput_over_rlboost_code": _worst(churny, (CODE,), _throughput),
        "throughput_over_verl_hybrid": _worst(cases, (VERL,), _throughput),
        "share_of_window_oracle": _worst(cases, (ORACLE,), _throughput),
        "tokens_per_money_over_best_baseline": _worst(cases, _BASELINES, _money),
    }


def further(results: Sequence[SimulatedResult]) -> dict[str, float | None]:
    """Ratios that are no figures: where the fleet seldom changes, and beside kinder versions of rivals. `samples`: a
    rule that no GRPO trainer can follow, as it computes gradients of samples whose groups are not complete.
    """
    cases = _by_case(results)
    churny = {case: found for case, found in cases.items() if OURS in found and found[OURS].changed >= CHURNY}
    calm = {case: found for case, found in cases.items() if case not in churny}
    return {
        "calm_over_rlboost_paper": _worst(calm, (PAPER,), _throughput),
        "calm_over_rlboost_code": _worst(calm, (CODE,), _throughput),
        "churny_over_rlboost_code_that_keeps_all": _worst(churny, (CODE_KEEPS,), _throughput),
        "calm_over_rlboost_code_that_keeps_all": _worst(calm, (CODE_KEEPS,), _throughput),
        "all_over_rlboost_paper_on_samples": _worst(cases, (SAMPLES,), _throughput),
        "money_over_rlboost_paper_on_samples": _worst(cases, (SAMPLES,), _money),
    }


def _by_case(results: Sequence[SimulatedResult]) -> dict[str, dict[str, SimulatedResult]]:
    cases: dict[str, dict[str, SimulatedResult]] = {}
    for one in results:
        cases.setdefault(one.case, {})[one.policy] = one
    return cases


def _throughput(one: SimulatedResult) -> float:
    return one.tokens_per_s


def _money(one: SimulatedResult) -> float:
    return one.tokens_per_dollar


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
