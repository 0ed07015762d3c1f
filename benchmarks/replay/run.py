"""Replays traces under all policies and puts the outcomes beside each other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Final

from msgspec import structs

from benchmarks.replay.bound import blind_ends, ends
from benchmarks.replay.report import LEGEND, SHARES
from benchmarks.replay.result import Result, speed_ratio
from benchmarks.replay.setting import (
    ABLATION,
    BALANCE,
    MIGRATE,
    ORACLE,
    PLATEAU_FIRST,
    POLICIES,
    RESTART,
    Policy,
    Setting,
)
from benchmarks.replay.traces import Distribution, FleetEvent, read_lengths, read_spot, serving, window
from benchmarks.replay.world import World

Say = Callable[[str], None]
HOUR_S: Final = 3_600.0
#: So much of each trace is enough to compare parts of the balancer, and for a quick look at everything.
_ABLATION_S: Final = 6 * HOUR_S
_QUICK_S: Final = 3 * HOUR_S
#: In which contexts cost and workers differ, so that learning both can show.
UNEVEN: Final = Setting(context_tokens=16_384.0, spread=0.3)


def draw_steps(lengths: Distribution, *, stretch: float, until: float, setting: Setting) -> list[list[int]]:
    """Response lengths of as many steps as could possibly end until then, by the seed alone."""
    draw = Random(setting.seed)
    steps: list[list[int]] = []
    soonest = 0.0
    while soonest <= until:
        steps.append([lengths.draw(draw, stretch=stretch, cap=setting.cap_tokens) for _ in range(setting.rollouts)])
        soonest += max(1.0, max(steps[-1]) / setting.rate)
    return steps


def replay(
    events: Sequence[FleetEvent],
    steps: Sequence[Sequence[int]],
    *,
    until: float,
    setting: Setting,
    policies: Iterable[Policy] = POLICIES,
    say: Say = print,
) -> list[dict[str, Any]]:
    """One row of figures per policy, of the same steps on the same fleet."""
    results: list[tuple[Result, float]] = []
    for policy in policies:
        began = perf_counter()
        result = World(events, until, policy, setting).run(steps)
        results.append((result, perf_counter() - began))
        say(f"  {policy.name}: {len(result.ends)} steps in {results[-1][1]:.1f} s")
    fleet = serving(events, setting.boot_s + setting.pull_s)
    alike = not setting.spread and not setting.context_tokens
    by_name = {result.policy: result.ends for result, _ in results}
    beside = {
        "over_first": results[0][0].ends,
        "share_of_oracle": by_name.get(ORACLE.name, []),
        "share_of_plateau_first": by_name.get(PLATEAU_FIRST.name, []),
        "share_of_bound": ends(steps, fleet, until, setting) if alike else [],
        "share_of_blind": blind_ends(steps, fleet, until, setting) if alike else [],
    }
    return [_row(result, cpu_s, beside) for result, cpu_s in results]


def _row(result: Result, cpu_s: float, beside: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The figures of a policy, and how fast it is beside others (0.0 where there is no such other)."""
    done = len(result.ends)
    return {
        "policy": result.policy,
        "steps": done,
        "mean_step_s": result.ends[-1] / done if done else 0.0,
        "tokens_per_s": result.tokens / result.ends[-1] if done else 0.0,
        "share_generated_twice": result.share_twice,
        "attempts_per_rollout": result.attempts_per_rollout,
        "moves": result.moves,
        **{name: speed_ratio(result.ends, other) for name, other in beside.items()},
        "cpu_s": cpu_s,
    }


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
    three hours of each trace, and the ablation of the first alone.
    """
    given = setting or Setting()
    span_s = span_s or (_QUICK_S if quick else 0.0)
    report: dict[str, Any] = {"setting": structs.asdict(given), "cases": [], "ablation": []}
    for path in traces:
        events = _cut(read_spot(path, given.seed), start_s, span_s, share, given.seed)
        for source in lengths:
            distribution = read_lengths(source, given.cap_tokens)
            for stretch in stretches:
                for number in slots:
                    case = structs.replace(given, slots=number)
                    named = {"trace": path.stem, "lengths": source.stem, "stretch": stretch, "slots": number}
                    say(" ".join(f"{key} {value}" for key, value in named.items()))
                    until = events[-1].t_s
                    steps = draw_steps(distribution, stretch=stretch, until=until, setting=case)
                    rows = replay(events, steps, until=until, setting=case, say=say)
                    report["cases"].append({**named, "policies": rows})
        if ablation and not (quick and path is not traces[0]):
            distribution = read_lengths(lengths[0], given.cap_tokens)
            report["ablation"] += _ablate(path.stem, events, distribution, stretches[-1], slots, given, say)
    report["figures"] = figures(report["cases"])
    report["legend"] = LEGEND
    return report


def _cut(events: list[FleetEvent], start_s: float, span_s: float, share: float, seed: int) -> list[FleetEvent]:
    kept = [event for event in events if Random(f"{seed} {event.node}").random() < share]
    return window(kept, start_s, span_s) if span_s else kept


def _ablate(
    name: str,
    events: list[FleetEvent],
    lengths: Distribution,
    stretch: float,
    slots: Sequence[int],
    given: Setting,
    say: Say,
) -> list[dict[str, Any]]:
    """The balancer whole and without each of its parts, on even workers, and on uneven ones whose contexts cost."""
    events = window(events, 0.0, _ABLATION_S)
    until = events[-1].t_s
    uneven = structs.replace(given, context_tokens=UNEVEN.context_tokens, spread=UNEVEN.spread)
    found = []
    for case in [*(structs.replace(given, slots=number) for number in slots), uneven]:
        named = {"trace": name, "stretch": stretch, "slots": case.slots, "uneven": case.spread > 0}
        say("ablation: " + " ".join(f"{key} {value}" for key, value in named.items()))
        steps = draw_steps(lengths, stretch=stretch, until=until, setting=case)
        rows = replay(events, steps, until=until, setting=case, policies=(BALANCE, MIGRATE, *ABLATION), say=say)
        found.append({**named, "policies": rows})
    return found


def figures(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst over the cases. `SHARES` are of those with most slots, and once more, with their own names, of those
    with fewest, where work outlasts the slots; of the latter is also what balancing gains over none.
    """
    most, fewest = max(case["slots"] for case in cases), min(case["slots"] for case in cases)
    rows = [{row["policy"]: row for row in case["policies"]} for case in cases]
    wide = [row for case, row in zip(cases, rows, strict=True) if case["slots"] == most]
    narrow = [row for case, row in zip(cases, rows, strict=True) if case["slots"] == fewest]
    return {
        **{share: min(row[BALANCE.name][share] for row in wide) for share in SHARES},
        **{f"{share}_with_fewest_slots": min(row[BALANCE.name][share] for row in narrow) for share in SHARES},
        "speedup_over_restart": min(row[BALANCE.name]["over_first"] for row in rows),
        "share_generated_twice": max(row[BALANCE.name]["share_generated_twice"] for row in rows),
        "share_generated_twice_by_restart": [row[RESTART.name]["share_generated_twice"] for row in wide],
        "balancing_over_none": min(row[BALANCE.name]["over_first"] / row[MIGRATE.name]["over_first"] for row in narrow),
        "attempts_per_rollout": max(row[BALANCE.name]["attempts_per_rollout"] for row in rows),
    }
