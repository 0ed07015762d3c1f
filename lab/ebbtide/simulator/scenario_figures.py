"""Computes what users compare of a scenario, with its spread over seeds, and encodes it as JSON."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import comb
from statistics import median
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.outcome import Outcome, PoolOutcome, StepOutcome

_COVERED: Final = 0.95


class SeedSpread(Struct, frozen=True, kw_only=True):
    """A figure over seeds. `low` and `high` bound the median at 95 % ("interval95"), or are the extremes ("range")."""

    median: float
    low: float
    high: float
    seeds: int  # that have this figure
    kind: Literal["range", "interval95"]


def spread(values: Iterable[float | None]) -> SeedSpread | None:
    """Returns the spread of the seeds that have the figure, or None if no seed has it.

    The interval is that of order statistics: it holds for every distribution (David and Nagaraja, Order Statistics,
    7.1). It needs six seeds. The whole range of five covers the median in 93.8 % of cases only.
    """
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    left_out = _left_out(len(found))
    return SeedSpread(
        median=median(found),
        low=found[left_out or 0],
        high=found[-1 - (left_out or 0)],
        seeds=len(found),
        kind="range" if left_out is None else "interval95",
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The quantile `share` (0 to 1) of values in any order, with linear interpolation; None without values."""
    if not values:
        return None
    found = sorted(values)
    at = share * (len(found) - 1)
    below = int(at)
    above = min(below + 1, len(found) - 1)
    return found[below] + (at - below) * (found[above] - found[below])


def _left_out(count: int) -> int | None:
    """How many values at each end an interval of 95 % leaves out; None if even the whole range covers less."""
    outside = 0.0  # the chance that the median lies beyond what is left out, and one value more, at either end
    for left_out in range(count // 2 + 1):
        outside += 2 * comb(count, left_out) / 2**count
        if 1 - outside < _COVERED:
            return left_out - 1 if left_out else None
    return None


_HOUR_S: Final = 3600.0
#: A figure that does not exist, such as the cost of a step where no step was finished, is None.
Figures = dict[str, SeedSpread | None]


class ScenarioFigures(Struct, frozen=True, kw_only=True):
    """A scenario's figures. Shares are between 0 and 1, costs in dollars, names of times end in `_s`."""

    scenario: str
    seeds: list[int]
    whole: Figures
    runs: dict[str, Figures]  # by run
    pools: dict[str, Figures]  # by pool of workers or trainer
    notes: list[str]  # for people: which figures are missing, and why


def figures(outcomes: Sequence[Outcome]) -> ScenarioFigures:
    """Computes the figures of one scenario from its outcomes, one for each seed. Raises `InvalidRequest` for none."""
    if not outcomes:
        raise InvalidRequest("must name at least one seed", field="seeds")
    ordered = sorted(outcomes, key=lambda outcome: outcome.seed)
    runs = sorted({step.run for outcome in ordered for step in outcome.steps})
    pools = _in_order(pool.pool for outcome in ordered for pool in outcome.pools)
    return ScenarioFigures(
        scenario=ordered[0].scenario,
        seeds=[outcome.seed for outcome in ordered],
        whole={name: spread(map(figure, ordered)) for name, figure in WHOLE.items()},
        runs={
            run: {name: spread(figure(_steps(one, run)) for one in ordered) for name, figure in RUN.items()}
            for run in runs
        },
        pools={
            pool: {name: spread(figure(_pool(one, pool)) for one in ordered) for name, figure in POOL.items()}
            for pool in pools
        },
        notes=list(_notes(ordered)),
    )


def step_times(steps: Iterable[StepOutcome]) -> list[float]:
    """Seconds between the ends of one run's consecutive steps; of the first step, since it was opened.

    Where steps overlap (a staleness above 0), this is the pace of training, and less than a step takes from its begin.
    """
    ordered = sorted(steps, key=lambda step: (step.trained_s, step.step))
    first = [ordered[0].trained_s - ordered[0].opened_s] if ordered else []
    return first + [after.trained_s - before.trained_s for before, after in pairwise(ordered)]


def _all_step_times(outcome: Outcome) -> list[float]:
    runs = {step.run for step in outcome.steps}
    return [seconds for run in sorted(runs) for seconds in step_times(_steps(outcome, run))]


def _steps(outcome: Outcome, run: str) -> list[StepOutcome]:
    return [step for step in outcome.steps if step.run == run]


def _pool(outcome: Outcome, pool: str) -> PoolOutcome | None:
    return next((one for one in outcome.pools if one.pool == pool), None)


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _over(amount: float, by: float) -> float | None:
    return amount / by if by else None


def _cost(outcome: Outcome) -> float:
    return sum(pool.cost for pool in outcome.pools)


def _sum(field: str) -> Callable[[Outcome], float]:
    return lambda outcome: float(sum(getattr(pool, field) for pool in outcome.pools))


def _idle_share(outcome: Outcome) -> float | None:
    machine_s = sum(pool.machine_s for pool in outcome.pools)
    return _over(sum(pool.idle_share * pool.machine_s for pool in outcome.pools), machine_s)


WHOLE: Final[dict[str, Callable[[Outcome], float | None]]] = {
    "tokens_per_s": lambda one: _over(one.tokens.kept, one.simulated_s),  # of responses that ended
    "steps": lambda one: float(len(one.steps)),
    "step_s_median": lambda one: quantile(_all_step_times(one), 0.5),
    "step_s_p90": lambda one: quantile(_all_step_times(one), 0.9),
    "idle_share": _idle_share,
    "cost_per_hour": lambda one: _over(_cost(one) * _HOUR_S, one.simulated_s),
    "cost_per_step": lambda one: _over(_cost(one), len(one.steps)),
    "cost_per_million_tokens": lambda one: _over(_cost(one) * 1e6, one.tokens.kept),
    "tokens_generated": lambda one: float(one.tokens.generated),
    "tokens_kept": lambda one: float(one.tokens.kept),
    "tokens_lost": lambda one: float(one.tokens.lost),
    "tokens_twice": lambda one: float(one.tokens.twice),
    "tokens_moved": lambda one: float(one.tokens.moved),
    "tokens_reread": lambda one: float(one.tokens.reread),
    "tokens_dropped": lambda one: float(one.tokens.dropped),
    "twice_share": lambda one: _over(one.tokens.twice, one.tokens.generated),
    "moves": lambda one: float(one.moves),
    "resumes": lambda one: float(one.resumes),
    "preemptions": lambda one: float(one.preemptions),
    "losses": _sum("losses"),
    "drains": _sum("drains"),
    "installs": lambda one: float(one.installs),
    "weight_bytes": lambda one: float(one.weight_bytes),
    "unfinished": lambda one: float(one.unfinished),
}

RUN: Final[dict[str, Callable[[list[StepOutcome]], float | None]]] = {
    "steps": lambda steps: float(len(steps)),
    "step_s_median": lambda steps: quantile(step_times(steps), 0.5),
    "step_s_p90": lambda steps: quantile(step_times(steps), 0.9),
    "generation_s_median": lambda steps: quantile([one.generated_s - one.opened_s for one in steps], 0.5),
    "tail_s_median": lambda steps: quantile([one.tail_s for one in steps], 0.5),
    "tokens_per_step": lambda steps: quantile([float(one.tokens) for one in steps], 0.5),
}


def _share_of_time(field: str) -> Callable[[PoolOutcome | None], float | None]:
    return lambda pool: _over(getattr(pool, field), pool.machine_s) if pool else None


POOL: Final[dict[str, Callable[[PoolOutcome | None], float | None]]] = {
    "machine_hours": lambda pool: pool.machine_s / _HOUR_S if pool else None,
    "busy_share": _share_of_time("busy_s"),
    # A pool without a machine was not idle: it was not there.
    "idle_share": lambda pool: pool.idle_share if pool and pool.machine_s else None,
    "booting_share": _share_of_time("booting_s"),
    "installing_share": _share_of_time("installing_s"),
    "held_share": _share_of_time("held_s"),
    "cost": lambda pool: pool.cost if pool else None,
    "losses": lambda pool: float(pool.losses) if pool else None,
    "drains": lambda pool: float(pool.drains) if pool else None,
}


def _notes(outcomes: Sequence[Outcome]) -> Iterable[str]:
    stepless = [str(outcome.seed) for outcome in outcomes if not outcome.steps]
    if stepless:
        yield (
            f"No step was finished with seed {', '.join(stepless)}: figures per step leave it out. Simulate more "
            "hours, or fewer and shorter rollouts."
        )
    if not all(outcome.tokens.kept for outcome in outcomes):
        yield "No response ended with some seed: its cost per token does not exist."


#: Grows when a field changes its meaning.
FORMAT: Final = 1


def figures_file(scenarios: Sequence[Sequence[Outcome]]) -> bytes:
    """Returns the file of several scenarios, of which the others are compared with the first.

    `outcomes` has each seed's steps, pools and counts; spans of machines are left out, as the picture shows them.
    """
    found = [figures(outcomes) for outcomes in scenarios]
    document = {
        "format": FORMAT,
        "kind": "simulation",
        "scenarios": [_scenario(one, found[0], outcomes) for one, outcomes in zip(found, scenarios, strict=True)],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def ratios(first: Figures, other: Figures) -> dict[str, float | None]:
    """The other's medians over the first one's; None where either is missing, or the first one's is 0."""
    return {name: _ratio(first, other, name) for name in other}


def _ratio(first: Figures, other: Figures, name: str) -> float | None:
    base, found = first.get(name), other[name]
    return found.median / base.median if base and found and base.median else None


def _scenario(one: ScenarioFigures, first: ScenarioFigures, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(one)
    built["ratios_to_first"] = ratios(first.whole, one.whole)
    built["outcomes"] = [
        msgspec.to_builtins(replace(outcome, spans=[])) for outcome in sorted(outcomes, key=lambda one: one.seed)
    ]
    for outcome in built["outcomes"]:
        del outcome["spans"]
    return built
