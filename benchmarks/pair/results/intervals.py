"""95 % intervals of one cell's figures, by a moving-block bootstrap over its requests or seconds."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.pair.results.figures import Block, Cell, Values
from benchmarks.pair.results.resampling import RUN, drawn_runs
from ebbtide.demo.coserving.coserving_records import ServedAnswer


def intervals(cell: Cell, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """Of means and 99th percentiles of both latencies, of attainment, and of the harvest; None where there is too
    little to say any."""
    whole = cell.whole
    later = np.array([one.tpot_s for one in whole if one.output > 1])
    good = np.array([_good(one, ttft_s, tpot_s) for one in whole], float)
    return {
        "ttft_mean_ms_interval": _interval(1e3 * cell.ttft, _mean),
        "ttft_p99_ms_interval": _interval(1e3 * cell.ttft, _p99),
        "tpot_mean_ms_interval": _interval(1e3 * later, _mean),
        "tpot_p99_ms_interval": _interval(1e3 * later, _p99),
        "slo_attainment_interval": _interval(good, _mean),
        "rollout_tokens_per_s_interval": harvest_interval(cell),
    }


def attainment_less_alone(cell: Cell, alone: Cell, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """How many more of the cell's requests attained both targets than of the same requests alone, as a share of all,
    with its 95 % interval."""
    pairs = [
        [_good(one, ttft_s, tpot_s) for one in answers]
        for blocks in zip(cell.blocks, alone.blocks, strict=True)
        for answers in zip(*(block.answers for block in blocks), strict=True)
    ]
    more = np.array([float(ours) - float(theirs) for ours, theirs in pairs])
    found = float(more.mean()) if len(more) else None
    return {"attainment_less_alone": found, "attainment_less_alone_interval": _interval(more, _mean)}


def _good(one: ServedAnswer, ttft_s: float, tpot_s: float) -> bool:
    return not one.failed and one.ttft_s <= ttft_s and (one.output < 2 or one.tpot_s <= tpot_s)


def harvest_interval(cell: Cell) -> tuple[float, float] | None:
    """Of rollout tokens/s. The page of grants counts each second's tokens, those of prompts too; the ledger, which
    counts those that were kept, says how many there were in all."""
    seconds = np.concatenate([_per_second(block) for block in cell.blocks]) if cell.blocks else np.empty(0)
    if len(seconds) < 2 * RUN or not seconds.mean():
        return None
    return _interval(seconds * (cell.tokens / cell.seconds / seconds.mean()), _mean)


def _per_second(block: Block) -> Values:
    """Tokens that the rollout engine computed in each whole second between the first request and the last answer."""
    moments = block.moments
    whole = [one for one in block.answers if not one.failed]
    if len(moments) < 2 or not whole:
        return np.empty(0)
    begin = max(moments[0].at_s, min(one.sent for one in whole))
    end = min(moments[-1].at_s, max(one.last for one in whole))
    marks = np.arange(begin, end, 1.0)
    counted = np.interp(marks, [one.at_s for one in moments], [float(one.generated) for one in moments])
    return np.array([after - before for before, after in pairwise(counted)])


def _interval(values: Values, figure: Callable[[Values], Values]) -> tuple[float, float] | None:
    drawn = drawn_runs(len(values))
    if not len(drawn):
        return None
    low, high = np.percentile(figure(values[drawn]), [2.5, 97.5])
    return float(low), float(high)


def _mean(values: Values) -> Values:
    return np.asarray(values.mean(axis=1))


def _p99(values: Values) -> Values:
    return np.asarray(np.percentile(values, 99, axis=1))
