"""Replays traces under all policies and puts the outcomes beside each other."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import nan
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from benchmarks.replay.bound import blind_ends, ends
from benchmarks.replay.played_case import PlayedCase, Say, play_all, speed_ratio
from benchmarks.replay.report import LEGEND, SHARES
from benchmarks.replay.setting import (
    ABLATION,
    BALANCE,
    MIGRATE,
    ORACLE,
    PLATEAU_FIRST,
    POLICIES,
    RESTART,
    Compared,
    Setting,
)
from benchmarks.replay.trace_scenario import ReplayCase, drawn_steps, serving_machines
from ebbtide.simulator.scenario.inputs.quantile_table import read_quantiles
from ebbtide.simulator.scenario.inputs.spot_trace import read_spot_trace

HOUR_S: Final = 3_600.0
#: So much of each trace is enough to compare parts of the balancer.
_ABLATION_S: Final = 6 * HOUR_S
#: For a quick look at everything: so much of a trace, and so small a part of its machines and of a step's rollouts.
_QUICK_S: Final = 1.5 * HOUR_S
_QUICK_MACHINES: Final = 6
_QUICK_ROLLOUTS: Final = 8
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
    ablation: bool = True,
    start_s: float = 0.0,
    span_s: float = 0.0,
    share: float = 1.0,
    say: Say = print,
) -> dict[str, Any]:
    """Level (a) of the migration benchmark: `cases`, `ablation`, `figures` (of several cases the worst), and `legend`.

    `start_s`, `span_s`: a window of each trace (0: all of it); `share` of its machines, drawn by the seed. `quick`:
    ninety minutes of each trace, a sixth of the machines, an eighth of the rollouts, and the ablation of the first
    trace alone. Raises `ScenarioRefused` for files that cannot be read.
    """
    given = setting or Setting()
    if quick:
        span_s, share = span_s or _QUICK_S, share / _QUICK_MACHINES
        given = structs.replace(given, rollouts=max(1, given.rollouts // _QUICK_ROLLOUTS))
    tables = {path: read_quantiles(path, str(path)) for path in lengths}
    cases: list[TitledCase] = []
    ablated: list[TitledCase] = []
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
        for source, stretch, number in product(lengths, stretches, slots):
            title = {"trace": path.stem, "lengths": source.stem, "stretch": stretch, "slots": number}
            alike = structs.replace(given, slots=number)
            case = structs.replace(whole, lengths=tables[source], stretch=stretch, setting=alike)
            cases.append(TitledCase(title, case, POLICIES))
        if ablation and not (quick and path is not traces[0]):
            ablated += _ablated(path.stem, whole, slots)
    shown = replay([*cases, *ablated], say)
    report: dict[str, Any] = {
        "setting": structs.asdict(given),
        "cases": shown[: len(cases)],
        "ablation": shown[len(cases) :],
    }
    return report | {"figures": figures(report["cases"]), "legend": LEGEND}


def _ablated(name: str, whole: ReplayCase, slots: Sequence[int]) -> list[TitledCase]:
    """The balancer whole and without each of its parts, on even workers, and on uneven ones whose contexts cost."""
    given = whole.setting
    uneven = structs.replace(given, context_tokens=UNEVEN.context_tokens, spread=UNEVEN.spread)
    found = []
    for setting in [*(structs.replace(given, slots=number) for number in slots), uneven]:
        title = {"trace": name, "stretch": whole.stretch, "slots": setting.slots, "uneven": setting.spread > 0}
        case = structs.replace(whole, setting=setting, span_s=min(whole.until_s, _ABLATION_S))
        found.append(TitledCase(title, case, (BALANCE, MIGRATE, *ABLATION)))
    return found


def replay(cases: Sequence[TitledCase], say: Say = print) -> list[dict[str, Any]]:
    """Each case with a row of figures per policy, of the same steps on the same fleet."""
    played = play_all([(one.case, policy) for one in cases for policy in one.policies])
    found = []
    for one in cases:
        say(", ".join(f"{key} {value}" for key, value in one.title.items()))
        rows = []
        for result in (next(played) for _ in one.policies):
            say(f"  {result.policy}: {len(result.ends)} steps in {result.cpu_s:.1f} s")
            rows.append(result)
        found.append({**one.title, "policies": _rows(one.case, rows)})
    return found


def _rows(case: ReplayCase, played: Sequence[PlayedCase]) -> list[dict[str, Any]]:
    by_name = {one.policy: one.ends for one in played}
    beside = {
        "over_first": played[0].ends,
        "share_of_oracle": by_name.get(ORACLE.name, []),
        "share_of_plateau_first": by_name.get(PLATEAU_FIRST.name, []),
        **_bounds(case),
    }
    return [_row(one, beside) for one in played]


def _bounds(case: ReplayCase) -> dict[str, list[float]]:
    """When steps end at the bounds, which hold where workers are alike and contexts cost nothing."""
    setting = case.setting
    if setting.spread or setting.context_tokens:
        return {"share_of_bound": [], "share_of_blind": []}
    steps, fleet = drawn_steps(case), serving_machines(case)
    return {
        "share_of_bound": ends(steps, fleet, case.until_s, setting),
        "share_of_blind": blind_ends(steps, fleet, case.until_s, setting),
    }


def _row(played: PlayedCase, beside: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The figures of a policy, and how fast it is beside others (0.0 where there is no such other)."""
    done = len(played.ends)
    return {
        "policy": played.policy,
        "steps": done,
        "mean_step_s": played.ends[-1] / done if done else 0.0,
        "tokens_per_s": played.tokens / played.ends[-1] if done else 0.0,
        "share_generated_twice": played.share_twice,
        "attempts_per_rollout": played.attempts_per_rollout,
        "moves": played.moves,
        **{name: speed_ratio(played.ends, other) for name, other in beside.items()},
        "cpu_s": played.cpu_s,
    }


def figures(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst over the cases. `SHARES` are of those with most slots, and once more, with their own names, of those
    with fewest, where work outlasts the slots; of the latter is also what balancing gains over none. A figure is nan if
    no two policies ended a step.
    """
    most, fewest = max(case["slots"] for case in cases), min(case["slots"] for case in cases)
    rows = [{row["policy"]: row for row in case["policies"]} for case in cases]
    wide = [row for case, row in zip(cases, rows, strict=True) if case["slots"] == most]
    narrow = [row for case, row in zip(cases, rows, strict=True) if case["slots"] == fewest]
    return {
        **{share: _least(row[BALANCE.name][share] for row in wide) for share in SHARES},
        **{f"{share}_with_fewest_slots": _least(row[BALANCE.name][share] for row in narrow) for share in SHARES},
        "speedup_over_restart": _least(row[BALANCE.name]["over_first"] for row in rows),
        "share_generated_twice": max(row[BALANCE.name]["share_generated_twice"] for row in rows),
        "share_generated_twice_by_restart": [row[RESTART.name]["share_generated_twice"] for row in wide],
        "balancing_over_none": _least(
            row[BALANCE.name]["over_first"] / none for row in narrow if (none := row[MIGRATE.name]["over_first"])
        ),
        "attempts_per_rollout": max(row[BALANCE.name]["attempts_per_rollout"] for row in rows),
    }


def _least(ratios: Iterable[float]) -> float:
    """Of those that are known: 0 stands for one that is not."""
    return min((ratio for ratio in ratios if ratio), default=nan)
