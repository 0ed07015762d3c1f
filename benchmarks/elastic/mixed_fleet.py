"""Compares steps on pools of unlike engines with those under an oracle that knows each engine's speed.

The oracle is the same placement and the same moves, handed the true time of every engine's step from the begin; like
Ebbtide it learns the distribution of lengths, and knows no length. `bound` says how far both are from what nobody can
beat: perfect balance of all tokens over all engines at their best load, or the longest response alone on the fastest
one. What the parts are worth is in `benchmarks.ablations`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.arguments import count
from benchmarks.elastic.compared.simulating_processes import each_simulated
from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.elastic.mixed_setting import (
    FAST,
    PROMPT_TOKENS,
    RUN,
    SLOW,
    MixedCase,
    cases,
    engines,
    mixed_simulation,
    scenario,
)
from benchmarks.log_level import errors_only
from benchmarks.rivals.changed_rounds import NO_KINDS, ChangedPolicy, told
from benchmarks.rivals.clairvoyant_policy import ToldSpeed
from ebbtide.simulator.scenario.machine_events import pool_of
from ebbtide.simulator.scenario.workload import Workload
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.simulation import Policy

OURS: Final = "ebbtide"
ORACLE: Final = "speeds told"
_STEPS, _QUICK_STEPS = 4, 2
_SEEDS: Final = (0, 1, 2)


def _told(case: MixedCase) -> Policy:
    costs = {pool: profile.costs for pool, profile in engines(case).items()}
    return ChangedPolicy(parts=(told(lambda name: ToldSpeed(costs[pool_of(name)], 1.0)), NO_KINDS))


POLICIES: Final[Mapping[str, Callable[[MixedCase], Policy]]] = {
    OURS: lambda _: EbbtidePolicy(),
    ORACLE: _told,
}


class MixedResult(Struct, frozen=True, kw_only=True):
    """What one policy came to in one case. Seconds are those in which steps generated, over all steps."""

    case: str
    seed: int
    policy: str
    generated_s: float
    bound_s: float
    step_s: Sequence[float]
    moves: int
    preemptions: int


def measured(terms: PartTerms) -> PartFindings:
    """The worst case and seed."""
    results = mixed_results(quick=terms.quick, jobs=terms.jobs, tell=terms.tell)
    value = mixed_fleet_over_oracle(results)
    return PartFindings(figures={"mixed_fleet_over_oracle": value}, simulated=True, details=report(results))


def mixed_results(*, quick: bool, jobs: int, tell: Callable[[str], None]) -> list[MixedResult]:
    """Simulate each case under each policy."""
    steps, seeds = (_QUICK_STEPS, _SEEDS[:1]) if quick else (_STEPS, _SEEDS)
    runs = [(case, policy) for case in cases(steps, seeds) for policy in POLICIES]
    results = []
    for _, one in each_simulated(_simulated, runs, jobs, _told_run):
        results.append(one)
        tell(f"{one.case}, seed {one.seed}: {one.policy} generates for {one.generated_s:.0f} s")
    return sorted(results, key=lambda one: (one.case, one.seed, list(POLICIES).index(one.policy)))


def _told_run(run: tuple[MixedCase, str]) -> str:
    case, policy = run
    return f"{case.name}, seed {case.seed}: {policy}"


def _simulated(run: tuple[MixedCase, str]) -> MixedResult:
    return simulated_mix(*run)


def simulated_mix(case: MixedCase, policy: str) -> MixedResult:
    errors_only()
    outcome = mixed_simulation(case, POLICIES[policy](case)).run(lambda _: None)
    step_s = [step.generated_s - step.opened_s for step in outcome.steps]
    return MixedResult(
        case=case.name,
        seed=case.seed,
        policy=policy,
        generated_s=round(sum(step_s), 1),
        bound_s=round(bound_s(case), 1),
        step_s=[round(one, 1) for one in step_s],
        moves=outcome.moves,
        preemptions=outcome.preemptions,
    )


def mixed_fleet_over_oracle(results: Sequence[MixedResult]) -> float | None:
    """The longest time of ours over the oracle's, of all cases and seeds; None without both."""
    return _worst(results, OURS)


def report(results: Sequence[MixedResult]) -> dict[str, Any]:
    """What the figure was made of."""
    return {
        "over_bound": over_bound(results),
        "results": msgspec.to_builtins(results),
    }


def over_bound(results: Sequence[MixedResult]) -> float | None:
    """The longest time of ours over what nobody can beat."""
    return round(max((one.generated_s / one.bound_s for one in results if one.policy == OURS), default=0.0), 4) or None


def _worst(results: Sequence[MixedResult], policy: str) -> float | None:
    told = {(one.case, one.seed): one.generated_s for one in results if one.policy == ORACLE}
    ratios = [
        one.generated_s / told[one.case, one.seed]
        for one in results
        if one.policy == policy and (one.case, one.seed) in told
    ]
    return round(max(ratios), 4) if ratios else None


def bound_s(case: MixedCase) -> float:
    """Seconds that no policy can go below, over all steps: no engine is ever lost, moves are free, and every step is as
    full as slots allow.
    """
    run, work, profiles = scenario(case).run[0], Workload(scenario(case), case.seed), engines(case)
    there = {FAST: case.fast, SLOW: case.slow}
    total = 0.0
    for step in range(case.steps):
        lengths = [
            work.turns(RUN, step, prompt, sample)[0].response
            for prompt in range(run.prompts)
            for sample in range(run.group)
        ]
        contexts = sum(length * (PROMPT_TOKENS + length / 2) for length in lengths)
        per_s = 0.0  # of all work that is done in a second
        for pool, number in there.items():
            costs = profiles[pool].costs
            most = min(case.slots, profiles[pool].sequences, len(lengths))
            token_s = costs.step_s(batch=most, context=0) / most
            per_s += number / (token_s * sum(lengths) + costs.context_s * contexts)
        alone_s = max(lengths) * profiles[FAST].costs.step_s(batch=1, context=PROMPT_TOKENS)
        total += max(1.0 / per_s, alone_s)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.mixed_fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and fewer steps")
    parser.add_argument("--jobs", type=count, default=1, help="processes at a time")
    options = parser.parse_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    results = mixed_results(quick=options.quick, jobs=options.jobs, tell=tell)
    for one in results:
        text = f"{one.case:<18}{one.seed:>3}  {one.policy:<18}{one.generated_s:>8.0f} s{one.bound_s:>8.0f} s at best"
        print(f"{text}{one.moves:>7} moves{one.preemptions:>7} preemptions")
    found = {"mixed_fleet_over_oracle": mixed_fleet_over_oracle(results), "over_bound": over_bound(results)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
