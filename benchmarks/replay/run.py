"""Replays traces under all policies and puts the outcomes beside each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import Struct, structs

from benchmarks.replay.played_case import PlayedCase, Say, play_all, speed_ratio
from benchmarks.replay.report import LEGEND
from benchmarks.replay.setting import (
    BALANCE,
    FAIR,
    MIGRATE,
    POLICIES,
    RESTART,
    Compared,
    Setting,
)
from benchmarks.replay.trace_scenario import ReplayCase, serving_machines
from ebbtide.simulator.scenario.input_tables import read_quantiles, read_spot_trace

HOUR_S: Final = 3_600.0
#: For a quick look at everything: so much of a trace, and so small a part of its machines and of a step's rollouts.
_QUICK_S: Final = 1.5 * HOUR_S
_QUICK_MACHINES: Final = 6
_QUICK_ROLLOUTS: Final = 8
#: Each policy is to end so many steps of a case.
_LEAST_STEPS: Final = 3
#: In which contexts cost and workers differ, so that learning both can show.
UNEVEN: Final = Setting(context_tokens=16_384.0, spread=0.3)


class TitledCase(Struct, frozen=True):
    """A case, its policies, and what its table is called by."""

    title: dict[str, Any]
    case: ReplayCase
    policies: Sequence[Compared]


def run_level(
    traces: Sequence[Path],
    lengths: Sequence[Path],
    *,
    stretches: Sequence[float] = (1.0, 4.0),
    slots: Sequence[int] = (64, 8),
    setting: Setting | None = None,
    quick: bool = False,
    start_s: float = 0.0,
    span_s: float = 0.0,
    share: float = 1.0,
    machines: int = 0,
    seeds: Sequence[int] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Level (a) of the migration benchmark: `cases`, `figures` (of several cases the worst), and `legend`.

    `start_s`, `span_s`: a window of each trace (0: all of it); `share` of its machines, drawn by the seed, or
    such a share that about so many `machines` are there at most. `seeds`: the cases are played once with each; by
    default with the setting's. `quick`: ninety minutes of each trace, a sixth of the machines, an eighth of the
    rollouts. Raises `FileRefused` for files that cannot be read.
    """
    given = setting or Setting()
    if quick:
        span_s, share = span_s or _QUICK_S, share / _QUICK_MACHINES
        given = structs.replace(given, rollouts=max(1, given.rollouts // _QUICK_ROLLOUTS))
    tables = {path: read_quantiles(path, str(path)) for path in lengths}
    cases: list[TitledCase] = []
    for path in traces:
        whole = ReplayCase(
            trace=read_spot_trace(path, str(path)),
            lengths=tables[lengths[0]],
            stretch=stretches[-1],
            setting=given,
            start_s=start_s,
            span_s=span_s,
            share=share,
        )
        if machines:
            whole = structs.replace(whole, share=share * _share_of(whole, machines))
        for source, stretch, number, seed in product(lengths, stretches, slots, seeds or (given.seed,)):
            title = {"trace": path.stem, "lengths": source.stem, "stretch": stretch, "slots": number, "seed": seed}
            alike = structs.replace(given, slots=number, seed=seed)
            case = structs.replace(whole, lengths=tables[source], stretch=stretch, setting=alike)
            cases.append(TitledCase(title, case, POLICIES))
    report: dict[str, Any] = {"setting": structs.asdict(given), "cases": replay(cases, say)}
    return report | {"figures": figures(report["cases"]), "legend": LEGEND}


def _share_of(whole: ReplayCase, machines: int) -> float:
    """The share of a trace's machines with which about so many are there at most."""
    return min(1.0, machines / max((number for _, number in serving_machines(whole)), default=machines))


def replay(cases: Sequence[TitledCase], say: Say = print) -> list[dict[str, Any]]:
    """Each case with a row of figures per policy, of the same steps on the same fleet. A case in which a policy ended
    too few steps is played again for longer, as far as the trace goes.
    """
    found: dict[int, dict[str, Any]] = {}
    waiting = dict(enumerate(cases))
    while waiting:
        played = play_all([(one.case, policy) for one in waiting.values() for policy in one.policies])
        again: dict[int, TitledCase] = {}
        for at, one in waiting.items():
            rows = _played(one, played, say)
            if min(len(row.ends) for row in rows) < _LEAST_STEPS and one.case.until_s < one.case.left_s:
                again[at] = structs.replace(one, case=structs.replace(one.case, span_s=2 * one.case.until_s))
            else:
                found[at] = {
                    **one.title,
                    "hours": round(one.case.until_s / HOUR_S, 2),
                    "policies": _rows(rows),
                }
        waiting = again
    return [found[at] for at in range(len(cases))]


def _played(one: TitledCase, played: Iterator[PlayedCase], say: Say) -> list[PlayedCase]:
    say(", ".join(f"{key} {value}" for key, value in one.title.items()))
    rows = []
    for result in (next(played) for _ in one.policies):
        say(f"  {result.policy}: {len(result.ends)} steps in {result.cpu_s:.1f} s")
        rows.append(result)
    return rows


def _rows(played: Sequence[PlayedCase]) -> list[dict[str, Any]]:
    by_name = {one.policy: one.ends for one in played}
    beside = {
        "over_first": played[0].ends,
        "over_none": by_name.get(MIGRATE.name),
        "share_of_fair_oracle": by_name.get(FAIR.name),
    }
    return [_row(one, beside) for one in played]


def _row(played: PlayedCase, beside: Mapping[str, Sequence[float] | None]) -> dict[str, Any]:
    """The figures of a policy, and how fast it is beside others: 0.0 where there is no such other, and nan where one of
    the two ended no step.
    """
    done = len(played.ends)
    return {
        "policy": played.policy,
        "steps": done,
        "mean_step_s": played.ends[-1] / done if done else nan,
        "tokens_per_s": played.tokens / played.ends[-1] if done else 0.0,
        "share_generated_twice": played.share_twice,
        "attempts_per_rollout": played.attempts_per_rollout,
        "moves": played.moves,
        "moves_per_rollout": played.moves_per_rollout,
        **{name: 0.0 if other is None else speed_ratio(played.ends, other) or nan for name, other in beside.items()},
        "cpu_s": played.cpu_s,
    }


class _Cell:
    """A case, once for each seed."""

    def __init__(self, cases: Sequence[dict[str, Any]]) -> None:
        self.slots: int = cases[0]["slots"]
        self._seeds = [{row["policy"]: row for row in case["policies"]} for case in cases]

    def each(self, policy: Compared, column: str) -> list[float]:
        """A policy's figure for each seed."""
        return [rows[policy.name][column] for rows in self._seeds]

    def mean(self, policy: Compared, column: str) -> float:
        return fmean(self.each(policy, column))


def _cells(cases: Sequence[dict[str, Any]]) -> list[_Cell]:
    """The cases that differ by more than the seed, and by how long they were played for it."""
    by_title: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in cases:
        title = tuple(value for key, value in case.items() if key not in {"seed", "hours", "policies"})
        by_title.setdefault(title, []).append(case)
    return [_Cell(cases) for cases in by_title.values()]


def figures(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst over the cells, each the mean over its seeds. A figure is nan if a policy ended no step in a cell, and
    None if it says nothing of these cells.
    """
    cells = _cells(cases)
    most = max(cell.slots for cell in cells)
    wide = [cell for cell in cells if cell.slots == most]
    gains = [cell.mean(BALANCE, "over_none") for cell in cells]
    return {
        "share_of_fair_oracle": _least(cell.mean(BALANCE, "share_of_fair_oracle") for cell in cells),
        "speedup_over_restart": _least(cell.mean(BALANCE, "over_first") for cell in cells),
        "share_generated_twice": max(cell.mean(BALANCE, "share_generated_twice") for cell in cells),
        "share_generated_twice_by_restart": [cell.mean(RESTART, "share_generated_twice") for cell in wide],
        "balancing_over_none": _least(gains),
        "balancing_over_none_mean": fmean(gains),
        "balancing_over_none_least_seed": _least(one for cell in cells for one in cell.each(BALANCE, "over_none")),
        "moves_per_rollout": max(cell.mean(BALANCE, "moves_per_rollout") for cell in cells),
        "attempts_per_rollout": max(cell.mean(BALANCE, "attempts_per_rollout") for cell in cells),
    }


def _least(ratios: Iterable[float]) -> float | None:
    """Of those that there are: 0 stands for one that there is not."""
    known = [ratio for ratio in ratios if ratio]
    if any(map(isnan, known)):
        return nan
    return min(known, default=None)


def unknown(found: Mapping[str, Any]) -> list[str]:
    """Figures that are nan, since some policy ended no step in some cell."""
    return [name for name, value in found.items() if isinstance(value, float) and isnan(value)]
