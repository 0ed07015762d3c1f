"""The guard's governor, simulated: `python -m benchmarks.pair.simulated --trace PATH`, from the root of the repository.

Serving alone, unguarded, ROSE's admission as reported, idle time alone, and the governor, all with the same arrivals
in virtual time (benchmarks/pair/simulated_pair.py). It says whether rules hold up over loads and traces; of real
engines it says nothing.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import arguments
from benchmarks.pair.always import Always
from benchmarks.pair.figures import TPOT_FACTOR, TTFT_FACTOR
from benchmarks.pair.rose import SETTING, TABLES, Rose
from benchmarks.pair.simulated_pair import Engines, Pair
from ebbtide.demo.coserving.coserving_traffic import (
    TraceLengths,
    TrafficBursts,
    TrafficRequest,
    faster,
    made_up,
    read_trace,
)
from ebbtide.scheduling.coserving.budget_decider import BudgetDecider, LatencyTargets, StepLimits
from ebbtide.scheduling.coserving.governor import Governor

_SHARES: Final = (0.5, 0.95, 0.99)
_HALVINGS: Final = 14
#: As reported, its test held to the whole SLO; memory plays no part here.
_ROSE: Final = "600,1,0.2,1"
#: Alone with other noise in the durations: how far two p99 of the same thing are apart.
_AGAIN: Final = 1000


class Row(NamedTuple):
    policy: str
    requests: int
    busy: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    attained: float
    share_of_ideal: float
    reclaim_p99_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair.simulated", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="t_s,input_tokens,output_tokens")
    parser.add_argument("--start-s", type=arguments.seconds, default=0.0, help="of the trace's window")
    parser.add_argument("--span-s", type=arguments.seconds, default=300.0, help="length of that window")
    parser.add_argument("--scale", type=arguments.factor, default=0.3, help="factor on the trace's lengths")
    parser.add_argument("--load", type=arguments.share, nargs="+", default=[0.2, 0.5, 0.8])
    parser.add_argument("--aim-tpot", type=arguments.seconds, nargs="+", default=[LatencyTargets().aim_tpot])
    parser.add_argument(
        "--together", type=arguments.factor, default=1.0, help="what overlapping steps get of the device"
    )
    parser.add_argument("--seeds", type=arguments.count, default=1)
    args = parser.parse_args()
    lengths = TraceLengths(prompts=args.scale, outputs=args.scale)
    window = (args.start_s, args.start_s + args.span_s)
    cases = {path.stem: read_trace(path, window, lengths) for path in args.trace}
    cases = cases or {
        "bursty": made_up(TrafficBursts(), args.span_s, 0),
        "poisson": made_up(TrafficBursts(size=1), args.span_s, 0),
    }
    engines = Engines(together=args.together)
    print("SIMULATION (virtual time; TTFT and TPOT in ms as p50/p95/p99)")
    for name, requests in cases.items():
        for load in args.load:
            for seed in range(args.seeds):
                print(f"\n{name}, load {load:g}, {len(requests)} requests, seed {seed}")
                print(table(compared(requests, load, engines, args.aim_tpot, seed)))


def compared(
    requests: Sequence[TrafficRequest], load: float, engines: Engines, aims: Sequence[float], seed: int
) -> list[Row]:
    """All policies at one load."""
    arrivals = faster(requests, speed_for(load, engines, requests))
    nothing, everything = StepLimits(tokens=0), StepLimits()
    alone = played(Always(LatencyTargets(), nothing), engines, arrivals, seed)
    slo = LatencyTargets(
        ttft_s=TTFT_FACTOR * percentile(ttft(alone), 0.99), tpot_s=TPOT_FACTOR * percentile(tpot(alone), 0.99)
    )
    each_s = engines.decode_each_s
    os.environ[SETTING] = _ROSE
    os.environ[TABLES] = f"{engines.prefill_s},{engines.prefill_token_s},{engines.decode_s + each_s},{each_s}"
    policies: dict[str, Callable[[], BudgetDecider]] = {
        "alone": partial(Always, slo, nothing),
        "unguarded": partial(Always, slo, everything),
        "rose": partial(Rose, slo, everything),
    }
    for aim in sorted({0.0, *aims}):
        policies[f"governor {aim:g}"] = partial(Governor, _aimed(slo, aim), everything)
    ideal = engines.rollouts / (engines.step_s + engines.step_token_s * engines.rollouts) * (alone.now - alone.busy_s)
    rows = [row(name, played(made(), engines, arrivals, seed), slo, ideal) for name, made in policies.items()]
    again = played(Always(slo, nothing), engines, arrivals, seed + _AGAIN)
    return [rows[0], row("alone again", again, slo, ideal), *rows[1:]]


def _aimed(slo: LatencyTargets, aim: float) -> LatencyTargets:
    return LatencyTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, aim_tpot=aim)


def played(decides: BudgetDecider, engines: Engines, requests: Sequence[TrafficRequest], seed: int) -> Pair:
    pair = Pair(decides, engines, requests, seed)
    pair.run()
    return pair


def speed_for(load: float, engines: Engines, requests: Sequence[TrafficRequest]) -> float:
    """How many times as fast they must come for serving alone to be busy for that share of the time."""
    slow, fast = 1e-3, 1e3
    for _ in range(_HALVINGS):
        speed = (slow * fast) ** 0.5
        pair = played(Always(LatencyTargets(), StepLimits(tokens=0)), engines, faster(requests, speed), 0)
        slow, fast = (speed, fast) if pair.busy_s < load * pair.now else (slow, speed)
    return float((slow * fast) ** 0.5)


def ttft(pair: Pair) -> list[float]:
    return [one.first - one.asked.at for one in pair.done]


def tpot(pair: Pair) -> list[float]:
    return [(one.last - one.first) / (one.made - 1) for one in pair.done if one.made > 1]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def row(policy: str, pair: Pair, slo: LatencyTargets, ideal: float) -> Row:
    first, later = ttft(pair), tpot(pair)
    met = sum(one <= slo.ttft_s for one in first) / len(first), sum(one <= slo.tpot_s for one in later) / len(later)
    return Row(
        policy=policy,
        requests=len(pair.done),
        busy=pair.busy_s / pair.now,
        ttft_ms=tuple(1e3 * percentile(first, share) for share in _SHARES),
        tpot_ms=tuple(1e3 * percentile(later, share) for share in _SHARES),
        attained=min(met),
        share_of_ideal=pair.harvested / ideal,
        reclaim_p99_ms=1e3 * percentile(pair.reclaims, 0.99),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows, and beside each p99 its multiple of alone's."""
    alone = rows[0]
    lines = [
        f"{'policy':<16}{'busy':>6}  {'TTFT':>22}{'x alone':>9}  {'TPOT':>20}{'x alone':>9}{'SLO':>7}{'harvest':>9}"
    ]
    lines[0] += f"{'reclaim p99':>13}"
    for one in rows:
        first = "/".join(f"{value:.0f}" for value in one.ttft_ms)
        later = "/".join(f"{value:.1f}" for value in one.tpot_ms)
        lines.append(
            f"{one.policy:<16}{one.busy:>6.2f}  {first:>22}{one.ttft_ms[-1] / alone.ttft_ms[-1]:>9.3f}  {later:>20}"
            f"{one.tpot_ms[-1] / alone.tpot_ms[-1]:>9.3f}{one.attained:>7.3f}{one.share_of_ideal:>9.3f}"
            f"{one.reclaim_p99_ms:>13.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
