"""How long the live decisions on groups take with 200 runs, on this machine."""

import time
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Final

from benchmarks.jobs.job_traces import TraceEntry, as_jobs, production
from benchmarks.jobs.replays import terms
from ebbtide.coordinator.rules.run_groups import Move, RunGroup
from ebbtide.simulator.shared_devices import Job, SharedDevices, TurnsPolicy

_RUNS: Final = 200


class TimedPolicy(TurnsPolicy):
    """The coordinator's decisions, each with the milliseconds that it took by the clock and of the processor, once
    `_RUNS` runs came.
    """

    def __init__(self) -> None:
        super().__init__(terms())
        self.took: dict[str, list[tuple[float, float]]] = {"seat": [], "review": []}
        self._arrivals = 0

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup | None:
        begin = _now()
        found = super().arrived(job, groups)
        self._note("seat", begin)
        self._arrivals += 1
        return found

    def review(self, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:
        begin = _now()
        found = super().review(groups, left)
        self._note("review", begin)
        return found

    def _note(self, name: str, begin: tuple[float, float]) -> None:
        if self._arrivals >= _RUNS:
            wall, processor = _now()
            self.took[name].append(((wall - begin[0]) * 1e3, (processor - begin[1]) * 1e3))


def decision_times(hours: float) -> dict[str, float]:
    """Simulate `_RUNS` runs at a time, whose phases vary and drift, for so many hours: where one leaves, the next one
    comes. Timed are the whole decisions, with all that they check: of seats, and of reviews each 900 seconds.
    """
    policy = TimedPolicy()
    SharedDevices(successive(hours), policy, terms()).run()
    every = [one for some in policy.took.values() for one in some]
    found = {"runs": float(_RUNS), "decisions": float(len(every)), "reviews": float(len(policy.took["review"]))}
    for name, some in (("", every), *((f"{kind}_", took) for kind, took in policy.took.items())):
        for clock, at in (("", 0), ("processor_", 1)):
            ranked = quantiles([one[at] for one in some], n=100)
            found |= {f"{clock}{name}p50_ms": ranked[49], f"{clock}{name}p99_ms": ranked[98]}
    return found


def successive(hours: float) -> list[Job]:
    """`_RUNS` at any time until the last hour, by types, bounds and stays of the production trace."""
    trace = production(0, _RUNS)
    entries: list[TraceEntry] = []
    for at, one in enumerate(trace):
        # The first of each place has been there for a while, so that not all of them leave together.
        now, following = 0.0, at
        stay = (one.leave_h - one.arrive_h) * (at + 0.5) / _RUNS
        while now < hours:
            drawn = trace[following % _RUNS]
            entries.append(drawn._replace(name=f"run{len(entries)}", arrive_h=now, leave_h=min(hours, now + stay)))
            now, following = now + stay, following + 7
            stay = trace[following % _RUNS].leave_h - trace[following % _RUNS].arrive_h
    return as_jobs(entries, noise=True, fixed_stay=True)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
