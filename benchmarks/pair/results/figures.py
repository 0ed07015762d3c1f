"""What a cell's answers say: percentiles with their confidence, attainment, harvest, and what is kept of promises."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from benchmarks.pair.results.resampling import drawn_runs
from benchmarks.pair.virtual.pair_costs_fit import StepSample
from ebbtide.demo.coserving.coserving_records import BudgetMoment, ServedAnswer
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

Values = npt.NDArray[np.float64]
#: ROSE's own multiples of the percentiles alone (its Qwen3-8B pair).
TTFT_FACTOR, TPOT_FACTOR = LatencyTargets().ttft_factor, LatencyTargets().tpot_factor
#: A p99 may be above that alone by so much (and a TTFT's by a rollout step and 10 ms).
MOST: Final = 1.10
SPARE_S: Final = 0.010
#: By load: the least share of the ideal harvest; and what rollouts make more than under ROSE.
HARVEST: Final = {20: 0.7, 50: 0.6}
OVER_ROSE: Final = 1.3
#: Requests of which a p99 says something.
_FEW: Final = 20


class Alone(Struct, frozen=True, kw_only=True):
    """The rollout engine by itself: tokens/s, and seconds of a step."""

    tokens_per_s: float
    step_s: float
    samples: list[StepSample] = []


class Block(Struct, kw_only=True):
    """One stretch of a trace under one policy. `harvested`: tokens that the rollout engine made meanwhile; `wasted`: of
    them, those of rollouts that were aborted; `again`: all tokens of those, which are to be made again; `reclaims`:
    seconds, 50th and 99th percentile and how many."""

    policy: str
    seconds: float
    answers: list[ServedAnswer]
    harvested: int = 0
    wasted: int = 0
    again: int = 0
    reclaims: tuple[float, float, int] = (0.0, 0.0, 0)
    status: dict[str, Any] = field(default_factory=dict)
    stray: float = 0.0  # of a core, what a stray process took; 0.0: there was none
    moments: list[BudgetMoment] = field(default_factory=list)


class Cell(Struct, kw_only=True):
    """All blocks of one policy at one load of one trace."""

    policy: str
    blocks: list[Block]

    @property
    def whole(self) -> list[ServedAnswer]:
        return [one for block in self.blocks for one in block.answers if not one.failed]

    @property
    def failed(self) -> int:
        return sum(bool(one.failed) for block in self.blocks for one in block.answers)

    @property
    def seconds(self) -> float:
        return sum(block.seconds for block in self.blocks)

    @property
    def tokens(self) -> int:
        """Harvested, less what was thrown away."""
        return sum(block.harvested - block.wasted for block in self.blocks)

    @property
    def ttft(self) -> Values:
        return np.array([one.ttft_s for one in self.whole])

    @property
    def tpot(self) -> Values:
        return np.array([one.tpot_s for one in self.whole if one.output > 1])

    @property
    def load(self) -> float:
        """Share of the time with a request inside."""
        return sum(inside_s(block.answers) for block in self.blocks) / self.seconds


def inside_s(answers: Sequence[ServedAnswer]) -> float:
    """Seconds with at least one request inside."""
    until = total = 0.0
    for one in sorted((one for one in answers if not one.failed), key=lambda one: one.sent):
        total += max(0.0, one.last - max(until, one.sent))
        until = max(until, one.last)
    return total


def percentile(values: Values, at: float) -> float:
    return float(np.percentile(values, at)) if len(values) else 0.0


def ratio_interval(cell: Cell, alone: Sequence[Cell], pick: Callable[[ServedAnswer], float]) -> tuple[float, float]:
    """95 % interval of the ratio of the cell's p99 to the mean of those alone, by a moving-block bootstrap: requests
    near one another are not independent, and all cells have the same arrivals, so runs of requests are drawn
    together."""
    lines = [
        [pick(one) for one in answers]
        for blocks in zip(*(each.blocks for each in (cell, *alone)), strict=False)
        for answers in zip(*(block.answers for block in blocks), strict=False)
        if not any(one.failed for one in answers) and answers[0].output > 1
    ]
    rows = drawn_runs(len(lines))
    if not len(rows):
        return 0.0, 0.0
    drawn = np.array(lines)[rows]
    p99 = np.percentile(drawn, 99, axis=1)
    low, high = np.percentile(p99[:, 0] / p99[:, 1:].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def attained(cell: Cell, ttft_s: float, tpot_s: float) -> float:
    """Share of all requests, failed ones among them, with both latencies within the SLO."""
    good = sum(one.ttft_s <= ttft_s and (one.output < 2 or one.tpot_s <= tpot_s) for one in cell.whole)
    return good / max(1, len(cell.whole) + cell.failed)


def unqueued(cell: Cell, alone: Sequence[Cell]) -> float | None:
    """The ratio of p99 TTFT, of requests alone that met nobody inside when serving was alone: in a burst all wait in a
    queue, beside which what rollouts do is small. None where these are too few to speak of."""
    numbers: list[tuple[int, int]] = []
    for number, block in enumerate(alone[0].blocks):
        until = 0.0
        for at, one in enumerate(block.answers):
            if one.sent >= until and not one.failed:
                numbers.append((number, at))
            until = max(until, one.last)

    def p99(one: Cell) -> float:
        answers = [one.blocks[number].answers[at] for number, at in numbers]
        return percentile(np.array([answer.ttft_s for answer in answers if not answer.failed]), 99)

    if len(numbers) < _FEW:
        return None
    return p99(cell) / float(np.mean([p99(one) for one in alone]))


def row(cell: Cell, alone: Sequence[Cell], rollouts: Alone, first: Cell | None = None) -> dict[str, Any]:
    """The figures of a cell beside those of serving alone, and the rollout engine alone. Of what was measured alone
    twice the mean of both p99 counts (p99 of as many requests each); the SLO is that of `first` (None:
    the first one of `alone`), as guards are told."""
    first = first or alone[0]
    ttft, tpot = cell.ttft, cell.tpot
    base_ttft = float(np.mean([percentile(one.ttft, 99) for one in alone]))
    base_tpot = float(np.mean([percentile(one.tpot, 99) for one in alone]))
    target_ttft, target_tpot = TTFT_FACTOR * percentile(first.ttft, 99), TPOT_FACTOR * percentile(first.tpot, 99)
    idle = 1.0 - float(np.mean([one.load for one in alone]))
    rate = cell.tokens / cell.seconds
    return {
        "policy": cell.policy,
        "requests": len(cell.whole),
        "failed": cell.failed,
        "seconds": cell.seconds,
        "load": cell.load,
        **{f"ttft_p{at}_ms": 1e3 * percentile(ttft, at) for at in (50, 95, 99)},
        **{f"tpot_p{at}_ms": 1e3 * percentile(tpot, at) for at in (50, 95, 99)},
        "ttft_p99_over_alone_interval": ratio_interval(cell, alone, lambda one: one.ttft_s),
        "tpot_p99_over_alone_interval": ratio_interval(cell, alone, lambda one: one.tpot_s),
        "ttft_p99_over_alone": percentile(ttft, 99) / base_ttft,
        "ttft_p99_excess_ms": 1e3 * (percentile(ttft, 99) - base_ttft - rollouts.step_s),
        "tpot_p99_over_alone": percentile(tpot, 99) / base_tpot,
        "ttft_p99_over_alone_unqueued": unqueued(cell, alone),
        "slo_ms": (1e3 * target_ttft, 1e3 * target_tpot),
        "slo_attainment": attained(cell, target_ttft, target_tpot),
        "rollout_tokens_per_s": rate,
        "share_of_ideal_harvest": rate / (rollouts.tokens_per_s * idle) if idle else 0.0,
        "tokens_generated_twice": sum(block.again for block in cell.blocks),
        "late_p99_ms": 1e3 * percentile(np.array([one.sent - one.due for one in cell.whole]), 99),
        "reclaim_p50_ms": 1e3 * max((block.reclaims[0] for block in cell.blocks), default=0.0),
        "reclaim_p99_ms": 1e3 * max((block.reclaims[1] for block in cell.blocks), default=0.0),
        "reclaims": sum(block.reclaims[2] for block in cell.blocks),
        "stray_share": sum(block.stray * block.seconds for block in cell.blocks) / cell.seconds,
    }


def kept(found: dict[str, Any], alone: Sequence[dict[str, Any]], rose: dict[str, Any] | None) -> dict[str, bool]:
    """Whether a cell of ours keeps what is promised beside those `alone`; `rose`: of the reported policy's settings,
    the one that kept its own SLO with most tokens, or the one that came nearest to keeping it."""
    least = HARVEST.get(found["target_load"], 0.0)
    told = {
        "ttft": found["ttft_p99_over_alone"] <= MOST or found["ttft_p99_excess_ms"] <= 1e3 * SPARE_S,
        "tpot": found["tpot_p99_over_alone"] <= MOST,
        "slo": found["slo_attainment"] >= min(0.99, *(one["slo_attainment"] for one in alone)),
        "harvest": found["share_of_ideal_harvest"] >= least,
        "reclaim": found["reclaim_p99_ms"] <= found["step_ms"] + 1e3 * SPARE_S,
        "step": found["step_ms"] <= 0.1 * found["slo_ms"][0],
    }
    if rose is not None:
        told["rose_ttft"] = found["ttft_p99_ms"] <= rose["ttft_p99_ms"]
        told["rose_tpot"] = found["tpot_p99_ms"] <= rose["tpot_p99_ms"]
        told["rose_tokens"] = found["rollout_tokens_per_s"] >= OVER_ROSE * rose["rollout_tokens_per_s"]
    return told


def best_rose(cells: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the reported policy's settings: most tokens among those that violate no p99 of its SLO, as it is reported to;
    if all do, the one that violates it least."""
    rivals = [one for one in cells if one["policy"].startswith("rose")]

    def over(one: dict[str, Any]) -> float:
        ttft: float = one["ttft_p99_over_alone"]
        tpot: float = one["tpot_p99_over_alone"]
        return max(1.0, ttft / TTFT_FACTOR, tpot / TPOT_FACTOR)

    return min(rivals, key=lambda one: (over(one), -float(one["rollout_tokens_per_s"])), default=None)
