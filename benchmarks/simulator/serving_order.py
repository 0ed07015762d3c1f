"""Whether the virtual serving pair puts policies in the order in which real engines do.

    python -m benchmarks.simulator.serving_order [RESULT] [--least N] [--seeds N] [--profile PATH] [--out PATH]

RESULT is a file of `benchmarks/coserving.py`. For each of its scenes, costs are fitted to the runs of each engine
alone, and the pair plays the same arrivals, block by block, under each policy. Two policies are judged by a figure
where their 95 % intervals on real engines are apart. A figure is not judged in a scene in which serving alone is apart
from itself: then the machine changed, and the intervals say too little.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.pair.virtual.pair_costs import PairCosts, pair_costs_text
from benchmarks.pair.virtual.served_engine import ServedCall
from benchmarks.pair.virtual.serving_policies import latency_percentile, resolved_targets, served_tpot, served_ttft
from benchmarks.simulator.measured_pair import FITTED_ON, MeasuredResult, fitted_costs, played_blocks, read_result
from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

_DEFAULT: Final = Path(__file__).parents[1] / "results" / "coserving.json"
FIGURES: Final = (
    "ttft_mean_ms",
    "ttft_p99_ms",
    "tpot_mean_ms",
    "tpot_p99_ms",
    "slo_attainment",
    "rollout_tokens_per_s",
)
#: Without a twin in virtual time: cores are not modelled apart, metrics are not read.
_UNMODELLED: Final = ("split", "observe")
_LEAST: Final = 300


class OrderedPair(Struct, frozen=True, kw_only=True):
    """Two policies, the first of which is lower on real engines."""

    scene: str
    figure: str
    lower: str
    higher: str
    real: tuple[tuple[float, float], tuple[float, float]]  # intervals of both
    simulated: tuple[float, float]

    @property
    def agree(self) -> bool:
        return self.simulated[0] < self.simulated[1]

    @property
    def judged(self) -> bool:
        """Not if the costs were fitted on one of the two."""
        return FITTED_ON not in (self.lower, self.higher)


def simulated_figures(
    result: MeasuredResult, scene: str, costs: PairCosts, names: Sequence[str], seeds: int
) -> dict[str, dict[str, float]]:
    """The figures of each policy, as means over seeds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(seeds):
        alone, _ = played_blocks(result, scene, costs, "alone", seed=seed)
        targets = resolved_targets(LatencyTargets(), alone)
        for name in names:
            calls, rate = played_blocks(result, scene, costs, name, targets=targets, seed=seed)
            found[name].append(_figures(calls, targets) | {"rollout_tokens_per_s": rate})
    return {name: {key: sum(one[key] for one in rows) / seeds for key in FIGURES} for name, rows in found.items()}


def _figures(calls: Sequence[ServedCall], targets: LatencyTargets) -> dict[str, float]:
    ttft, tpot = served_ttft(calls), served_tpot(calls)
    return {
        "ttft_mean_ms": 1e3 * sum(ttft) / max(1, len(ttft)),
        "ttft_p99_ms": 1e3 * latency_percentile(ttft, 99),
        "tpot_mean_ms": 1e3 * sum(tpot) / max(1, len(tpot)),
        "tpot_p99_ms": 1e3 * latency_percentile(tpot, 99),
        "slo_attainment": sum(one.meets(targets.ttft_s, targets.tpot_s) for one in calls) / max(1, len(calls)),
    }


def ordered_pairs(
    scene: str, rows: Sequence[dict[str, Any]], simulated: dict[str, dict[str, float]]
) -> tuple[list[OrderedPair], list[str]]:
    """Pairs whose intervals are apart, and the figures that are not judged because serving alone is apart from
    itself."""
    found: list[OrderedPair] = []
    drifted: list[str] = []
    again = [one for one in rows if one["policy"].startswith("alone")]
    for figure in FIGURES:
        if any(_apart(one, two, figure) for one, two in combinations(again, 2)):
            drifted.append(figure)
            continue
        known = [one for one in rows if one["policy"] in simulated and one.get(f"{figure}_interval")]
        for one, two in combinations(known, 2):
            if (order := _apart(one, two, figure)) is None:
                continue
            lower, higher = order
            found.append(
                OrderedPair(
                    scene=scene,
                    figure=figure,
                    lower=lower["policy"],
                    higher=higher["policy"],
                    real=(tuple(lower[f"{figure}_interval"]), tuple(higher[f"{figure}_interval"])),
                    simulated=(simulated[lower["policy"]][figure], simulated[higher["policy"]][figure]),
                )
            )
    return found, drifted


def _apart(one: dict[str, Any], two: dict[str, Any], figure: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Both in their order, if their intervals are apart."""
    first, second = one.get(f"{figure}_interval"), two.get(f"{figure}_interval")
    if not first or not second:
        return None
    if first[1] < second[0]:
        return one, two
    return (two, one) if second[1] < first[0] else None


def modelled(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The policies of a scene that have a twin in virtual time."""
    names = [one["policy"] for one in rows]
    return [
        name
        for name in names
        if name.partition(":")[0] not in _UNMODELLED and name != "alone-again" and "=" not in name
    ]


def judge(result: MeasuredResult, least: int, seeds: int, console: Console) -> dict[str, Any]:
    """All scenes: figures, pairs and residuals."""
    pairs: list[OrderedPair] = []
    told: dict[str, Any] = {}
    for scene in result.alone_runs:
        rows = result.rows(scene)
        few = min((one["requests"] for one in rows), default=0)
        if few < least:
            console.print(f"{scene}: {few} requests a cell are fewer than {least}, so it is not judged")
            continue
        costs, names = fitted_costs(result, scene), modelled(rows)
        simulated = simulated_figures(result, scene, costs, names, seeds)
        found, drifted = ordered_pairs(scene, rows, simulated)
        pairs += found
        left_out = [one["policy"] for one in rows if one["policy"] not in names]
        told[scene] = {
            "costs": msgspec.to_builtins(costs),
            "simulated": simulated,
            "not_judged": drifted,
            "left_out": left_out,
            "profile": pair_costs_text(costs),
        }
        show(scene, costs, found, drifted, console)
    judged = [one for one in pairs if one.judged]
    agree = sum(one.agree for one in judged)
    return {
        "figures": {
            "serving_pairs_judged": len(judged),
            "serving_pairs_in_order": agree,
            "serving_pairs_in_order_share": agree / len(judged) if judged else None,
        },
        "pairs": [msgspec.to_builtins(one) | {"agree": one.agree, "judged": one.judged} for one in pairs],
        "scenes": told,
    }


def show(scene: str, costs: PairCosts, pairs: Sequence[OrderedPair], drifted: Sequence[str], console: Console) -> None:
    console.print(f"\n{scene}: SIMULATION against real engines", style="bold")
    fits = "; ".join(f"{one.figure} {one.measured:.4g} real, {one.error:+.0%}" for one in costs.residuals)
    console.print(f"serving alone: {fits}", markup=False)
    if drifted:
        console.print(f"not judged, because serving alone differs from itself: {', '.join(drifted)}", markup=False)
    table = Table()
    for column in ("figure", "lower", "higher", "real lower", "real higher", "simulated", "order"):
        table.add_column(column)
    for one in pairs:
        real = [f"{low:.4g}..{high:.4g}" for low, high in one.real]
        order = ("agrees" if one.agree else "DIFFERS") if one.judged else "(fitted on)"
        table.add_row(one.figure, one.lower, one.higher, *real, "{:.4g}, {:.4g}".format(*one.simulated), order)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator.serving_order",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, nargs="?", default=_DEFAULT)
    parser.add_argument(
        "--least", type=arguments.count, default=_LEAST, help="requests of a cell; scenes with fewer are not judged"
    )
    parser.add_argument(
        "--seeds", type=arguments.count, default=3, help="of the simulation; its figures are their means"
    )
    parser.add_argument("--profile", type=Path, help="write the first judged scene's costs there")
    parser.add_argument("--out", type=arguments.output, help="write all of it as JSON")
    options, console = parser.parse_args(argv), Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    try:
        found = judge(read_result(options.result), options.least, options.seeds, console)
    except InvalidRequest as error:
        print(f"serving_order: {error}", file=sys.stderr)
        return 2
    if options.profile and found["scenes"]:
        options.profile.write_text(next(iter(found["scenes"].values()))["profile"])
    if options.out:
        options.out.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    console.print("")
    for name, value in found["figures"].items():
        console.print(f"{name:<32} {value}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
