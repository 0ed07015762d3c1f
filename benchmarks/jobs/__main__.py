"""Compares ways to run several jobs on the same devices: `make bench-jobs`.

Everything here is simulated but the time of decisions. A job does the same rounds under every policy, with the same
times, so money is compared at equal work; slowdowns are against what the very same rounds take alone. The production
trace is drawn by published statistics unless `--jobs` names a file with the columns job, arrive_h, leave_h, type and
slowdown. Replays that were made are kept below `runs/bench-jobs`, so a benchmark that was interrupted goes on where it
was; a quick one keeps none. The comparison has no tail merging in any policy; the part `ablations` has it in both.
Figures that need real processes are null.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from benchmarks.arguments import count, output, result
from benchmarks.conditions import conditions
from benchmarks.jobs.cost_bounds import fluid_bound, lp_bound
from benchmarks.jobs.decision_times import decision_times
from benchmarks.jobs.job_traces import (
    LATER_32B_8K,
    MIXES,
    PRODUCTION_HOURS,
    ROLLOUT_PRICE,
    TRAIN_PRICE,
    TYPES,
    TraceEntry,
    as_jobs,
    mix,
    production,
    read_trace,
    width,
)
from benchmarks.jobs.replays import MERGING, POLICIES, Replays, colocated, pooled, terms, told
from benchmarks.rivals.rollmux_policy import RollMuxPolicy
from ebbtide.coordinator.rules.phase_turns import NO_MERGING
from ebbtide.simulator.shared_devices import SharedDevices, TurnsPolicy

#: Published for the production trace, in dollars an hour, and for two 7B-8k jobs at once the work for the same money.
_PUBLISHED: Final = {
    "alone_per_hour": 936.0,
    "colocated_per_hour": 704.0,
    "rollmux_per_hour": 510.0,
    "colocated_pair": 1.24,
    "rollmux_pair": 1.82,
}
_KEPT: Final = Path(__file__).parents[2] / "runs" / "bench-jobs"
_POOL_SHARES: Final = (0.7, 0.8, 0.9, 1.0)
_WHY_NULL: Final = "needs real processes: the simulation does not measure it"
FIGURES: Final = (
    "cost_over_rollmux_at_equal_work",
    "cost_over_rollmux_production",
    "within_bound_share",
    "cost_over_bound",
    "calibration_worst_error",
    "real_time_over_serial",
    "real_time_over_kernel",
    "freed_share",
    "decision_p99_ms",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer jobs, one seed: six minutes on two cores")
    parser.add_argument("--jobs", type=Path, help="a trace: job,arrive_h,leave_h,type,slowdown")
    parser.add_argument("--seeds", type=count, help="traces of each kind")
    parser.add_argument("--out", type=output)
    options = parser.parse_args(argv)
    out = options.out or result("jobs", quick=options.quick)
    begin_s, under = time.monotonic(), conditions()
    seeds = range(options.seeds or (1 if options.quick else 2))
    traces = [read_trace(options.jobs)] if options.jobs else [production(seed) for seed in seeds]
    report = run(traces, seeds, quick=options.quick)
    report |= {
        "trace": options.jobs.name if options.jobs else "synthetic: drawn by published statistics",
        "took_s": round(time.monotonic() - begin_s, 1),
        "conditions": under | {"quick": options.quick},
    }
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    for name in FIGURES:
        value = report["figures"][name]
        print(f"{name:<34} {'null' if value is None else f'{value:.4g}':<8} {report['skipped'].get(name, '')}")
    print(f"written to {out}")
    return 0


def run(traces: Sequence[Sequence[TraceEntry]], seeds: Sequence[int], *, quick: bool) -> dict[str, Any]:
    """All parts, and the figures of them."""
    jobs_of_mix = 100 if quick else 300
    replays = Replays(None if quick else _KEPT)
    found: dict[str, Any] = {}
    found["calibration"] = _part("calibration", lambda: calibration(traces[0]))
    found["production"] = _part("production", lambda: [compared(trace, replays, pool=True) for trace in traces])
    for kind in MIXES:
        mixes = [mix(kind, seed, jobs_of_mix) for seed in seeds]
        found[kind] = _part(kind, partial(_compared, mixes, replays))
    found["ablations"] = _part("ablations", lambda: ablations(traces[0], replays))
    found["decisions"] = _part("decisions", lambda: decision_times(10.0 if quick else 40.0))
    figures = dict.fromkeys(FIGURES) | _figures(found)
    return {
        "figures": figures,
        "simulated": [name for name, value in figures.items() if value is not None and name != "decision_p99_ms"],
        "skipped": {name: _WHY_NULL for name, value in figures.items() if value is None},
        "parts": found,
    }


def _part(name: str, made: Callable[[], Any]) -> Any:
    begin_s = time.monotonic()
    print(f"part {name}", file=sys.stderr, flush=True)
    found = msgspec.to_builtins(made())
    print(f"  {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    return found


def _compared(traces: Sequence[Sequence[TraceEntry]], replays: Replays) -> list[dict[str, Any]]:
    return [compared(trace, replays) for trace in traces]


def compared(trace: Sequence[TraceEntry], replays: Replays, *, pool: bool = False) -> dict[str, Any]:
    """All policies over one trace, with fixed times and with times that vary and drift."""
    under = terms()
    fixed, varied = as_jobs(trace), as_jobs(trace, noise=True)
    found: dict[str, Any] = {
        "fixed": {name: replays.replay(name, fixed, under) for name in POLICIES},
        "varied": {name: replays.replay(name, varied, under) for name in ("alone", "rollmux", "ebbtide")},
        "fluid_bound": fluid_bound(fixed, under),
        "lp_bound": lp_bound(fixed, under),
    }
    if pool:
        found["fixed"]["colocated"] = colocated(trace, fixed)
        found["fixed"] |= {f"rlix_{share}": pooled(trace, fixed, share) for share in _POOL_SHARES}
    return found


def calibration(trace: Sequence[TraceEntry]) -> dict[str, float]:
    """The published figures, simulated: jobs stay as long as the trace says, whatever they have done."""
    stays = as_jobs(trace, fixed_stay=True)
    hours = PRODUCTION_HOURS
    alone = SharedDevices(stays, POLICIES["alone"](terms()), terms()).run().price / hours
    colocated_price = sum((one.leave_h - one.arrive_h) * width(one) for one in trace) * TRAIN_PRICE / hours
    rollmux = SharedDevices(stays, POLICIES["rollmux"](terms()), terms()).run().price / hours
    kind = TYPES["7B-8k"]
    pair_price = ROLLOUT_PRICE + TRAIN_PRICE
    pair = [
        replace(job, name=f"{job.name}{at}")
        for at, job in enumerate(as_jobs([TraceEntry("pair", 0.0, 24.0, "7B-8k", 2.0)] * 2))
    ]
    shared = told(SharedDevices(pair, POLICIES["rollmux"](terms()), terms()).run(), pair)
    alone_pair = pair_price * kind.alone_s / 3600.0
    found = {
        "alone_per_hour": alone,
        "colocated_per_hour": colocated_price,
        "rollmux_per_hour": rollmux,
        "colocated_pair": alone_pair / (TRAIN_PRICE * kind.colocated_s / 3600.0),
        "rollmux_pair": alone_pair / shared.price_per_round,
    }
    return found | {f"{name}_error": abs(found[name] / known - 1.0) for name, known in _PUBLISHED.items()}


def ablations(trace: Sequence[TraceEntry], replays: Replays) -> dict[str, Any]:
    """RollMux with and without what its replay here may differ in, as published (dollars an hour, jobs stay as the
    trace says); and both with tails merged, at equal work.
    """
    found: dict[str, Any] = {}
    loose = [entry._replace(slowdown=2.0) for entry in trace]
    slower = [entry._replace(times=LATER_32B_8K) if entry.type == "32B-8k" else entry for entry in trace]
    for name, entries, merging, switch, more in (
        ("as_replayed", trace, NO_MERGING, 1.0, {}),
        ("migration", trace, MERGING, 1.0, {}),
        ("mixed_32B", trace, NO_MERGING, 1.0, {"mixes": True}),
        ("no_switch_cost", trace, NO_MERGING, 0.0, {}),
        ("saturated_too", trace, NO_MERGING, 1.0, {"prunes": False}),
        ("all_bounds_2", loose, NO_MERGING, 1.0, {}),
        ("slower_32B_8k", slower, NO_MERGING, 1.0, {}),
    ):
        under = terms(merging)
        jobs = as_jobs(entries, fixed_stay=True, switch=switch)
        policy = RollMuxPolicy(under, merging=merging, **more)
        outcome = SharedDevices(jobs, policy, under).run()
        ended = told(outcome, jobs)
        found[name] = {
            "per_hour": outcome.price / PRODUCTION_HOURS,
            "slowdown": ended.slowdown,
            "missed": ended.missed,
        }
    under = terms(MERGING)
    jobs = as_jobs(trace)
    merged = {name: replays.replay(name, jobs, under) for name in ("rollmux", "ebbtide")}
    still = TurnsPolicy(terms(), review_every_s=inf)
    return {
        "rollmux": found,
        "merged": merged,
        "without_moves": told(SharedDevices(jobs, still, terms()).run(), jobs),
        "merged_cost_over_rollmux": merged["ebbtide"].price_per_round / merged["rollmux"].price_per_round,
        "merged_lp_bound": lp_bound(jobs, under),
    }


def _figures(found: dict[str, Any]) -> dict[str, float]:
    shares = {name: _over_rollmux(found[name]) for name in ("production", *MIXES)}
    varied = [one["varied"]["ebbtide"] for name in ("production", *MIXES) for one in found[name]]
    calibrated = found["calibration"]
    return {
        "cost_over_rollmux_at_equal_work": max(shares.values()),
        "cost_over_rollmux_production": shares["production"],
        "within_bound_share": 1.0 - sum(one["missed"] for one in varied) / sum(one["jobs"] for one in varied),
        "cost_over_bound": sum(one["fixed"]["ebbtide"]["price"] for one in found["production"])
        / sum(one["lp_bound"] for one in found["production"]),
        "calibration_worst_error": max(
            calibrated[f"{name}_error"] for name in ("alone_per_hour", "colocated_per_hour", "colocated_pair")
        ),
        "decision_p99_ms": found["decisions"]["p99_ms"],
    }


def _over_rollmux(traces: Sequence[dict[str, Any]]) -> float:
    """Money for the same work, by fixed times and by those that vary: the worse of both."""
    paid = {
        (times, name): sum(float(one[times][name]["price"]) for one in traces)
        for times in ("fixed", "varied")
        for name in ("rollmux", "ebbtide")
    }
    return max(paid[times, "ebbtide"] / paid[times, "rollmux"] for times in ("fixed", "varied"))


if __name__ == "__main__":
    raise SystemExit(main())
