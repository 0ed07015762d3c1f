"""Compares windows of trainers that generate between their steps: `make bench-elastic`.

Steps are simulated, with the planner in `ebbtide.scheduling.elastic`, which no live trainer asks yet. The time of a
decision and the error of streamed gradients are measured on this machine. Figures that need live loans and engines are
null, with the reason.

The recorded spot traces are looked for beside the checkout, in `shared/traces`; elsewhere name them by `--spot`.
Without them traces are made up, and the file says `synthetic` of each. The oracle tries several windows of each step in
copies of the world. That takes longer than all the rest, so a quick run asks it for one model only.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from benchmarks.arguments import count, output
from benchmarks.conditions import conditions
from benchmarks.elastic import mixed_fleet
from benchmarks.elastic.decision_time import decision_times_ms
from benchmarks.elastic.elastic_figures import SimulatedResult, figures, further, result_of, skipped
from benchmarks.elastic.elastic_policies import COMPARED, ORACLE
from benchmarks.elastic.elastic_setting import MODELS, ElasticCase, simulation
from benchmarks.elastic.streamed_gradient import streamed_gradient_error
from benchmarks.elastic.window_oracle import TRIED
from benchmarks.log_level import errors_only
from benchmarks.synthetic import CALM, CHURNY, write_trace

_ROOT: Final = Path(__file__).parents[2]
_TRACES: Final = _ROOT.parent / "shared" / "traces"
_SPOT: Final = ("spot_aws_g4dn_24.csv", "spot_gcp_a100x1_64.csv")
_OUT: Final = _ROOT / "benchmarks" / "results" / "elastic.json"
#: Steps of a case. The fewer ones are for a run of at most twelve minutes on two cores.
_STEPS, _QUICK_STEPS = 24, 8
#: The model that the oracle is asked for in a quick run: the one of which the most is published.
_ORACLES: Final = ("14b",)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} steps in place of {_STEPS}")
    parser.add_argument("--spot", nargs="+", type=Path, help="spot traces: t_s,event,node or t_s,count")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=list(COMPARED), default=list(COMPARED))
    parser.add_argument("--steps", type=count, help="steps of each case")
    parser.add_argument("--jobs", type=count, default=min(2, len(os.sched_getaffinity(0))), help="processes at a time")
    parser.add_argument("--out", type=output, default=_OUT)
    options = parser.parse_args()
    for trace in options.spot or ():
        if not trace.is_file():
            parser.error(f"--spot: {trace} is not a file")
    begin_s = time.monotonic()
    with TemporaryDirectory() as scratch:
        known = known_traces()
        traces = options.spot or known or _made_up(Path(scratch))
        synthetic = not (options.spot or known)
        steps = options.steps or (_QUICK_STEPS if options.quick else _STEPS)
        cases = [ElasticCase(model, trace.resolve(), steps) for model in options.models for trace in traces]
        runs = _runs(cases, options.policies, _ORACLES if options.quick else options.models)
        results = _simulated(runs, options.jobs)
    mixed = mixed_fleet.mixed_results(quick=options.quick, jobs=options.jobs)
    times_ms = decision_times_ms()
    found = figures(results, round(quantiles(times_ms, n=100)[98], 2), streamed_gradient_error())
    found |= {"mixed_fleet_over_oracle": mixed_fleet.mixed_fleet_over_oracle(mixed)}
    _print(results)
    report = {
        "kind": "simulation",
        "figures": found,
        "skipped": skipped(found),
        "traces": [{"name": trace.stem, "synthetic": synthetic} for trace in traces],
        "oracle": {"models": sorted({one.model for one, policy in runs if policy == ORACLE}), "windows": TRIED},
        "decision_ms": {"p50": round(quantiles(times_ms, n=100)[49], 2), "workers": 1000, "measured": "CPU time"},
        "policies": {name: one.what for name, one in COMPARED.items()},
        "further": further(results),
        "mixed": mixed_fleet.report(mixed),
        "results": msgspec.to_builtins(results),
        "took_s": round(time.monotonic() - begin_s, 1),
        "conditions": conditions(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"written to {options.out}")


def known_traces() -> list[Path]:
    """The recorded traces, if all of them are there."""
    found = [_TRACES / name for name in _SPOT]
    return found if all(path.is_file() for path in found) else []


def _made_up(scratch: Path) -> list[Path]:
    made = (("synthetic_calm.csv", CALM), ("synthetic_churny.csv", CHURNY))
    return [write_trace(churn, scratch / name) for name, churn in made]


def _runs(
    cases: Sequence[ElasticCase], policies: Sequence[str], oracles: Sequence[str]
) -> list[tuple[ElasticCase, str]]:
    """What is simulated, the longest first."""
    runs = [(case, policy) for case in cases for policy in policies if policy != ORACLE or case.model in oracles]
    return sorted(runs, key=lambda one: one[1] != ORACLE)


def _simulated(runs: Sequence[tuple[ElasticCase, str]], jobs: int) -> list[SimulatedResult]:
    with ProcessPoolExecutor(jobs) as pool:
        under_way = [pool.submit(_simulate, case, policy) for case, policy in runs]
        results = []
        for run in as_completed(under_way):
            one = run.result()
            results.append(one)
            print(f"{one.case}: {one.policy} makes {one.tokens_per_s:.0f} tokens/s ({one.cpu_s} s)", file=sys.stderr)
    return sorted(results, key=lambda one: (one.case, list(COMPARED).index(one.policy)))


def _simulate(case: ElasticCase, policy: str) -> SimulatedResult:
    errors_only()
    begin_s = sum(os.times()[:4])  # with the oracle's copies
    compared = COMPARED[policy]
    outcome = simulation(case, compared.policy(case), compared.fleet(case)).run(lambda _: None)
    return result_of(case.name, policy, outcome, sum(os.times()[:4]) - begin_s)


def _print(results: Sequence[SimulatedResult]) -> None:
    print(f"{'case (simulated)':<32}{'policy':<26}{'tokens/s':>9}{'tokens/$':>10}{'changed':>9}{'spot':>6}")
    for one in results:
        print(
            f"{one.case:<32}{one.policy:<26}{one.tokens_per_s:>9.0f}{one.tokens_per_dollar:>10.0f}"
            f"{one.changed:>9.0%}{one.instances:>6.1f}"
        )


if __name__ == "__main__":
    main()
