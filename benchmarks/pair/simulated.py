"""The guard's governor, simulated: `python -m benchmarks.pair.simulated --trace PATH`, from the root of the repository.

Serving alone, unguarded, ROSE's policy as reported, idle time alone, and the governor, all with the same arrivals in
virtual time (benchmarks.pair.virtual). It says whether rules hold up over loads and traces; of real engines it says
nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from benchmarks import arguments
from benchmarks.pair.results.figures import TPOT_FACTOR, TTFT_FACTOR
from benchmarks.pair.stray import STRAY
from benchmarks.pair.virtual.pair_costs import PairCosts, read_pair_costs
from benchmarks.pair.virtual.serving_comparison import compared, speed_for_load
from benchmarks.pair.virtual.serving_figures import ServingFigures
from benchmarks.pair.virtual.serving_policies import played_alone, resolved_targets
from ebbtide.demo.coserving.request_traffic import (
    TraceLengths,
    TrafficBursts,
    TrafficRequest,
    faster,
    made_up,
    read_trace,
)
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

#: As reported, its test held to the whole SLO and to a quarter of it.
_ROSES: Final = ("rose:600,1,0.2,1", "rose:600,1,0.2,0.25")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    lengths = TraceLengths(prompts=args.scale, outputs=args.scale)
    window = (args.start_s, args.start_s + args.span_s)
    cases = {path.stem: read_trace(path, window, lengths) for path in args.trace}
    cases = cases or {
        "bursty": made_up(TrafficBursts(), args.span_s, 0),
        "poisson": made_up(TrafficBursts(size=1), args.span_s, 0),
    }
    costs = read_pair_costs(args.costs) if args.costs else PairCosts()
    if args.together:
        costs = replace(costs, serving_beside=args.together / 2, rollouts_beside=args.together / 2)
    slo = LatencyTargets(ttft_factor=args.ttft_factor, tpot_factor=args.tpot_factor)
    names = ["unguarded", *(args.rose or _ROSES), "idle-only", *(f"ours:{aim:g}" for aim in args.aim_tpot)]
    print("SIMULATION (virtual time; TTFT and TPOT in ms as p50/p95/p99)")
    for name, requests in cases.items():
        for load in args.load:
            for seed in range(args.seeds):
                print(f"\n{name}, load {load:g}, {len(requests)} requests, seed {seed}")
                print(table(figures(requests, load, costs, slo, names, seed, noise=args.noise)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair.simulated", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="t_s,input_tokens,output_tokens")
    parser.add_argument("--start-s", type=arguments.seconds, default=0.0, help="of the trace's window")
    parser.add_argument("--span-s", type=arguments.seconds, default=300.0, help="length of that window")
    parser.add_argument("--scale", type=arguments.factor, default=0.3, help="factor on the trace's lengths")
    parser.add_argument("--load", type=arguments.share, nargs="+", default=[0.2, 0.5, 0.8])
    parser.add_argument("--aim-tpot", type=arguments.share, nargs="+", default=[LatencyTargets().aim_tpot])
    parser.add_argument("--ttft-factor", type=arguments.factor, default=TTFT_FACTOR, help="SLO over the p99 alone")
    parser.add_argument("--tpot-factor", type=arguments.factor, default=TPOT_FACTOR, help="likewise; default: ROSE's")
    parser.add_argument("--rose", action="append", help="rose:STEP_S,WATERMARK,HEADROOM,HELD; repeatable")
    parser.add_argument("--costs", type=Path, help="profile of a pair's costs; default: of no measured pair")
    parser.add_argument("--together", type=arguments.factor, help="what overlapping steps get of the device, in all")
    parser.add_argument("--noise", action="store_true", help="beside a stray process; the SLO is that without it")
    parser.add_argument("--seeds", type=arguments.count, default=1)
    return parser


def figures(
    requests: Sequence[TrafficRequest],
    load: float,
    costs: PairCosts,
    slo: LatencyTargets,
    names: Sequence[str],
    seed: int,
    *,
    noise: bool = False,
) -> list[ServingFigures]:
    """All policies at one load. `noise`: beside a stray process, under the SLO that is meant without it."""
    arrivals = faster(requests, speed_for_load(requests, load, costs))
    if noise:
        slo = resolved_targets(slo, played_alone(arrivals, costs, seed=seed).done)
        costs = replace(costs, stray=STRAY)
    return compared(arrivals, costs, slo, names, seed=seed)


def table(rows: Sequence[ServingFigures]) -> str:
    """The rows, and beside each p99 its multiple of alone's."""
    alone = rows[0]
    columns = f"{'policy':<22}{'load':>6}  {'TTFT':>22}{'x alone':>9}  {'TPOT':>20}{'x alone':>9}"
    lines = [f"{columns}{'SLO':>7}{'harvest':>9}{'reclaim p99':>13}"]
    for one in rows:
        first = "/".join(f"{value:.0f}" for value in one.ttft_ms)
        later = "/".join(f"{value:.1f}" for value in one.tpot_ms)
        lines.append(
            f"{one.policy:<22}{one.load:>6.2f}  {first:>22}{one.ttft_ms[-1] / alone.ttft_ms[-1]:>9.3f}  {later:>20}"
            f"{one.tpot_ms[-1] / alone.tpot_ms[-1]:>9.3f}{one.attained:>7.3f}{one.share_of_ideal:>9.3f}"
            f"{one.reclaim_p99_ms:>13.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
