"""Measures how much of a processor a window's decision takes for a fleet of a thousand workers."""

from random import Random
from statistics import quantiles
from time import thread_time
from typing import Final

from benchmarks.elastic.elastic_part import PartFindings, PartTerms
from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.group_lengths import GroupLeft
from ebbtide.scheduling.elastic.loan_view import LendableDevice, LoanView
from ebbtide.scheduling.elastic.window_planner import WindowPlanner

_WORKERS: Final = 1_000
_GROUPS: Final = 8_000  # of eight rollouts: 64 for each worker
_CAP: Final = 14_336
_DECISIONS: Final = 300


def measured(_: PartTerms) -> PartFindings:
    """The figure is the 99th percentile of the processor's time."""
    parts = quantiles(decision_times_ms(), n=100)
    found = {"p50": round(parts[49], 2), "p99": round(parts[98], 2), "workers": _WORKERS, "measured": "CPU time"}
    return PartFindings(figures={"decision_p99_ms": round(parts[98], 2)}, details=found)


def decision_times_ms(decisions: int = _DECISIONS) -> list[float]:
    """Milliseconds of the processor for each decision, at moments all over a step."""
    draw, planner, times = Random(0), WindowPlanner(), list[float]()
    planner.lengths.step_ended([_lengths(draw) for _ in range(512)])
    planner.trained(5_000_000, 400.0)
    groups = [_lengths(draw) for _ in range(_GROUPS)]
    for decision in range(decisions):
        view = _view(groups, made=_CAP * decision // (2 * decisions))
        begin_s = thread_time()
        planner.plan(view)
        times.append(1e3 * (thread_time() - begin_s))
    return times


def _lengths(draw: Random) -> list[int]:
    mean = draw.lognormvariate(8.3, 0.55)
    return [min(_CAP, max(1, round(mean * draw.lognormvariate(0.0, 0.2)))) for _ in range(8)]


def _view(groups: list[list[int]], made: int) -> LoanView:
    left = [
        GroupLeft(
            prompt=256,
            finished=[one for one in lengths if one <= made],
            running=[made for one in lengths if one > made],
            cap=_CAP,
        )
        for lengths in groups
        if max(lengths) > made
    ]
    return LoanView(
        groups=left,
        ready_tokens=0,
        complete=len(groups) - len(left),
        remote=_WORKERS - 4.0,
        devices=[LendableDevice(name=str(at)) for at in range(4)],
        batch=64.0,
        kv_tokens=400_000.0,
        pace=EnginePace(step_s=0.012, rollout_s=0.0001, context_s=2e-8),
        read_s=1.0 / 20_000.0,
    )
