"""How long the live decisions on groups take with 200 runs, on this machine."""

import time
from statistics import quantiles
from typing import Final

from benchmarks.jobs.job_traces import MIXES, TraceEntry, as_jobs, mix, production
from benchmarks.jobs.replays import terms
from ebbtide.coordinator.rules.run_groups import RunGroup
from ebbtide.simulator.shared_devices import TurnsPolicy

_RUNS: Final = 200


def decision_times(decisions: int) -> dict[str, float]:
    """Seat 200 runs; then, so many times, let one more come and go, and review a group. Milliseconds, of each
    single call of `GroupPlanner.seat` and `GroupPlanner.review` once all 200 are there.
    """
    trace = [*production(0, 200), *mix(MIXES[3], 0, 300)]
    entries = [TraceEntry(f"run{at}", 0.0, 1.0, one.type, one.slowdown, one.times) for at, one in enumerate(trace)]
    jobs = as_jobs(entries)
    policy = TurnsPolicy(terms())
    groups: dict[str, RunGroup] = {}
    for job in jobs[:_RUNS]:
        found = policy.arrived(job, groups)
        if found is None:
            raise RuntimeError(f"{job.name} was not seated, though nodes are not limited")
        groups[found.name] = found
    took: dict[str, list[float]] = {"seat": [], "review": []}
    for number in range(decisions):
        job = jobs[_RUNS + number % (len(jobs) - _RUNS)]
        begin = time.perf_counter()
        seated = policy.arrived(job, groups)
        took["seat"].append((time.perf_counter() - begin) * 1e3)
        group = list(groups.values())[number % len(groups)]
        begin = time.perf_counter()
        policy.reviewed(group, groups)
        took["review"].append((time.perf_counter() - begin) * 1e3)
        if seated is not None:
            policy.left(job.name)
    every = [one for some in took.values() for one in some]
    return {
        "runs": float(_RUNS),
        "decisions": float(len(every)),
        "p50_ms": quantiles(every, n=100)[49],
        "p99_ms": quantiles(every, n=100)[98],
        **{f"{name}_p99_ms": quantiles(some, n=100)[98] for name, some in took.items()},
    }
