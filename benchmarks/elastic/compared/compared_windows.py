"""Compares windows over models and spot traces, in simulations of RLBoost's settings.

The oracle tries several windows of each step in copies of the world. That takes longer than all the rest, so a quick
run asks it for one model only, and leaves out the policies that are no baseline of a figure.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.elastic.assumptions import VARIED
from benchmarks.elastic.compared.kept_simulations import KeptSimulations, WantedSimulation
from benchmarks.elastic.compared.varied_assumptions import VARIED_POLICIES, assumption_table
from benchmarks.elastic.elastic_figures import SimulatedResult, figures, further
from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from benchmarks.elastic.elastic_policies import COMPARED, ORACLE
from benchmarks.elastic.elastic_setting import MODELS, ElasticCase
from benchmarks.elastic.window_oracle import TRIED
from benchmarks.synthetic import CALM, CHURNY, write_trace

_TRACES: Final = Path(__file__).parents[3].parent / "shared" / "traces"
_SPOT: Final = ("spot_aws_g4dn_24.csv", "spot_gcp_a100x1_64.csv")
#: Steps of a case: in full; where assumptions are varied; and in a run of at most twelve minutes on two cores, of which
#: this part has four.
_STEPS, _VARIED_STEPS, _QUICK_STEPS = 24, 8, 6
#: The model of which the most is published: a quick run asks the oracle for it, and assumptions are varied for it.
_FIRST: Final = "14b"


class Traces(NamedTuple):
    spot: Sequence[Path]
    synthetic: bool  # the spot traces are made up


def measured(terms: PartTerms) -> PartFindings:
    with TemporaryDirectory() as scratch:
        return _compared(terms, traces(terms, Path(scratch)))


def traces(terms: PartTerms, scratch: Path) -> Traces:
    """Those that were named; else the recorded ones, if all are there; else made-up ones."""
    known = [_TRACES / name for name in _SPOT]
    there = all(path.is_file() for path in known)
    spot = list(terms.spot) or (known if there else _made_up(scratch))
    return Traces([path.resolve() for path in spot], synthetic=not terms.spot and not there)


def _made_up(scratch: Path) -> list[Path]:
    made = (("synthetic_calm.csv", CALM), ("synthetic_churny.csv", CHURNY))
    return [write_trace(churn, scratch / name) for name, churn in made]


def _compared(terms: PartTerms, known: Traces) -> PartFindings:
    steps = terms.steps or (_QUICK_STEPS if terms.quick else _STEPS)
    cases = [
        ElasticCase(model, trace, steps, terms.seed, lengths=terms.lengths)
        for model in terms.models or tuple(MODELS)
        for trace in known.spot
    ]
    wanted = _wanted(terms, cases)
    varied = [] if terms.quick or terms.policies else _varied(cases)
    every = [*wanted, *varied]
    results = KeptSimulations(terms.kept, terms.tell).results(every, terms.jobs)
    usual = results[: len(wanted)]
    _print(usual, terms)
    found = figures(usual)
    return PartFindings(
        figures=found,
        skipped={name: _SKIPPED for name, value in found.items() if value is None},
        simulated=True,
        details=_setting(terms, known, steps, wanted)
        | {
            "further": further(usual),
            "assumptions": assumption_table(results, [one.case for one in every]),
            "results": msgspec.to_builtins(usual),
        },
    )


def _setting(terms: PartTerms, known: Traces, steps: int, wanted: Sequence[WantedSimulation]) -> dict[str, Any]:
    """What was compared, on which inputs."""
    return {
        "steps": steps,
        "traces": [{"name": trace.stem, "synthetic": known.synthetic} for trace in known.spot],
        "lengths": terms.lengths.name if terms.lengths is not None else "fitted to published points",
        "oracle": {"models": sorted({one.case.model for one in wanted if one.policy == ORACLE}), "windows": TRIED},
        "policies": {name: one.what for name, one in COMPARED.items()},
    }


_SKIPPED: Final = "no case has both policies, or none changes often enough"


def _wanted(terms: PartTerms, cases: Sequence[ElasticCase]) -> list[WantedSimulation]:
    """What is simulated: each case with each policy that is asked for."""
    policies = terms.policies or tuple(name for name, one in COMPARED.items() if one.quick or not terms.quick)
    return [
        WantedSimulation(case, policy)
        for case in cases
        for policy in policies
        if policy != ORACLE or not terms.quick or case.model == _FIRST
    ]


def _varied(cases: Sequence[ElasticCase]) -> list[WantedSimulation]:
    """One model with other assumptions, one at a time, and with another seed of the work."""
    usual = [case._replace(steps=_VARIED_STEPS) for case in cases if case.model == _FIRST]
    others = [case._replace(assumed=assumed) for assumed in VARIED for case in usual]
    seeds = [case._replace(seed=case.seed + 1) for case in usual]
    return [WantedSimulation(case, policy) for case in (*usual, *seeds, *others) for policy in VARIED_POLICIES]


def _print(results: Sequence[SimulatedResult], terms: PartTerms) -> None:
    terms.tell(
        f"{'case (simulated)':<28}{'policy':<26}{'tokens/s':>9}{'tokens/$':>10}{'changed':>9}{'spot':>6}{'step':>7}"
    )
    for one in results:
        terms.tell(
            f"{one.case:<28}{one.policy:<26}{one.tokens_per_s:>9.0f}{one.tokens_per_dollar:>10.0f}"
            f"{one.changed:>9.0%}{one.instances:>6.1f}{fmean(one.step_s):>6.0f}s"
        )
