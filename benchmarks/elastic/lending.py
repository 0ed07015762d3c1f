"""The part `lending`: what a window for the trainer's devices is worth beside lending for the whole step, and never.

Small cases that take some seconds each: a quarter of a published setting. They differ in the tail of the lengths, in
the engines elsewhere, and in the trainer's speed. The first step is left out, as nothing is learnt in it yet. Ratios
below the spread of the seeds say nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.elastic.assumptions import Assumptions
from benchmarks.elastic.compared.compared_windows import traces
from benchmarks.elastic.compared.simulating_processes import each_simulated
from benchmarks.elastic.elastic_figures import result_of
from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.elastic.elastic_setting import ElasticCase, Fleet, simulation
from benchmarks.log_level import errors_only
from ebbtide.simulator.world.simulation import Policy
from ebbtide.simulator.world.training.elastic_window import ElasticPolicy

OURS: Final = "ebbtide"
NEVER: Final = "never lent"
_STEPS: Final = 3
_SEEDS: Final = 3
_USUAL: Final = Assumptions(most=2)
#: Name -> which of the traces, and the assumptions.
CASES: Final[Mapping[str, tuple[int, Assumptions]]] = {
    "usual": (0, _USUAL),
    "long tail": (1, _USUAL._replace(sigma=1.0)),
    "equal lengths": (1, _USUAL._replace(sigma=0.3)),
    "many engines elsewhere": (0, _USUAL._replace(most=5)),
    "slow trainer": (1, _USUAL._replace(training=1.8)),
}
#: One of so many parts of the published step and of its trainer.
_SCALE: Final = 4
POLICIES: Final[Mapping[str, tuple[Policy, Fleet]]] = {
    OURS: (ElasticPolicy(), Fleet()),
    "lent for the whole step": (ElasticPolicy(plans=False), Fleet()),
    NEVER: (ElasticPolicy(plans=False), Fleet(window_s=0.0)),
}


class LendingRun(Struct, frozen=True, kw_only=True):
    name: str  # of `CASES`
    case: ElasticCase
    policy: str


class LendingResult(Struct, frozen=True, kw_only=True):
    case: str
    seed: int
    policy: str
    step_s: Sequence[float]  # all steps
    tokens_per_dollar: float


def measured(terms: PartTerms) -> PartFindings:
    """The figure is the worst case's steps per hour over those without loans, in the mean of its seeds."""
    with TemporaryDirectory() as scratch:
        known = traces(terms, Path(scratch)).spot
        runs = [
            LendingRun(
                name=name,
                case=ElasticCase("14b", known[at % len(known)], _STEPS, seed, assumed=assumed, scale=_SCALE),
                policy=policy,
            )
            for name, (at, assumed) in CASES.items()
            for seed in range(terms.seed, terms.seed + _SEEDS)
            for policy in POLICIES
        ]
        results = []
        for _, one in each_simulated(_simulated, runs, terms.jobs, lambda run: f"{run.name}: {run.policy}"):
            results.append(one)
            terms.tell(f"{one.case}, seed {one.seed}: {one.policy} takes {one.step_s} s")
    found = table(sorted(results, key=lambda one: one.seed))
    return PartFindings(
        figures={"steps_over_never_lent": min(row[OURS]["steps_over_never_lent"] for row in found.values())},
        simulated=True,
        details={
            "steps": _STEPS,
            "traces": [trace.stem for trace in known],
            "cases": found,
            "results": msgspec.to_builtins(results),
        },
    )


def _simulated(run: LendingRun) -> LendingResult:
    errors_only()
    policy, fleet = POLICIES[run.policy]
    outcome = simulation(run.case, policy, fleet).run(lambda _: None)
    found = result_of(run.name, run.policy, outcome, 0.0)
    return LendingResult(
        case=run.name,
        seed=run.case.seed,
        policy=run.policy,
        step_s=found.step_s,
        tokens_per_dollar=round(found.tokens_per_dollar),
    )


def table(results: Sequence[LendingResult]) -> dict[str, dict[str, Any]]:
    """By case and policy: steps per hour in the mean of the seeds, the least and the highest, the same over never
    lent, and tokens for a dollar.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in dict.fromkeys(one.case for one in results):
        hourly = {
            policy: [3600.0 / fmean(one.step_s[1:]) for one in results if (one.case, one.policy) == (case, policy)]
            for policy in dict.fromkeys(one.policy for one in results)
        }
        rows[case] = {
            policy: {
                "steps_per_hour": round(fmean(found), 2),
                "least_and_highest": [round(min(found), 2), round(max(found), 2)],
                "steps_over_never_lent": round(
                    fmean(one / other for one, other in zip(found, hourly[NEVER], strict=True)), 4
                ),
                "tokens_per_dollar": round(
                    fmean(one.tokens_per_dollar for one in results if (one.case, one.policy) == (case, policy))
                ),
            }
            for policy, found in hourly.items()
        }
    return rows
