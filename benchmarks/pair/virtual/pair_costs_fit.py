"""Fits a pair's costs to what was measured of each of its engines alone, and says how good the fit is.

Durations are fitted by least squares in which no cost is negative. The residuals are those of the whole model: the
pair plays the measured requests with the fitted costs, and its figures are compared with the measured ones.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.pair.virtual.pair_costs import CostResidual, PairCosts
from benchmarks.pair.virtual.serving_policies import latency_percentile, played_alone
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.errors import InvalidRequest

Values = npt.NDArray[np.float64]

#: A fit of three costs wants more requests than that.
_LEAST: Final = 20
#: No work is free: a cost that the fit finds to be nothing is this.
_LEAST_S: Final = 1e-6
#: Rounds in which the slowest tenth of durations is left out: hiccups of a machine are no cost of the work.
_KEPT: Final = 0.9
_PERCENTILES: Final = (50.0, 95.0, 99.0)


class MeasuredRequest(Struct, frozen=True, array_like=True):
    """A request that a real engine served without rollouts. Times are in seconds from the begin of its block."""

    sent: float
    first: float
    last: float
    prompt: int  # tokens
    output: int


class StepSample(Struct, frozen=True, array_like=True):
    """What a rollout engine did by itself in a short time."""

    steps: int
    tokens: int
    busy_s: float  # in which steps ran


def fit_served(blocks: Sequence[Sequence[MeasuredRequest]], costs: PairCosts) -> PairCosts:
    """`costs` with those of the served engine, its noise and the residuals fitted to these blocks of requests. Raises
    `InvalidRequest` if they are too few."""
    if sum(map(len, blocks)) < _LEAST:
        raise InvalidRequest(f"needs at least {_LEAST} requests of serving alone: measure for longer", field="alone")
    prefill = _fit_prefill(blocks)
    decode = _fit_decode(blocks, prefill)
    fitted = replace(
        costs,
        prefill_s=max(_LEAST_S, prefill[0]),
        prefill_token_s=prefill[1],
        decode_s=max(_LEAST_S, decode[0]),
        decode_each_s=decode[1],
        hiccup=0,
    )
    fitted = _centred(blocks, fitted)
    return replace(fitted, residuals=residuals(blocks, fitted))


def fit_rollout_steps(samples: Sequence[StepSample]) -> tuple[float, float]:
    """Seconds of a step, and of each of its tokens."""
    useful = [one for one in samples if one.steps > 0]
    if not useful:
        raise InvalidRequest("needs rollout steps without served requests", field="rollouts_alone")
    rows = np.array([(one.steps, one.tokens) for one in useful], float)
    step_s, token_s = _not_negative(rows, np.array([one.busy_s for one in useful]))
    return max(_LEAST_S, step_s), token_s


def residuals(blocks: Sequence[Sequence[MeasuredRequest]], costs: PairCosts) -> tuple[CostResidual, ...]:
    """How far percentiles of both latencies, and the load, are from the measured ones."""
    arrivals = ([TrafficRequest(one.sent, one.prompt, one.output) for one in block] for block in blocks)
    played = [played_alone(requests, costs) for requests in arrivals]
    calls = [call for pair in played for call in pair.done]
    measured = [one for block in blocks for one in block]
    told = {
        "ttft": ([one.first - one.sent for one in measured], [one.ttft_s for one in calls]),
        "tpot": (
            [(one.last - one.first) / (one.output - 1) for one in measured if one.output > 1],
            [one.tpot_s for one in calls if one.made > 1],
        ),
    }
    found = [
        CostResidual(
            figure=f"{name}_p{at:.0f}_ms",
            measured=1e3 * latency_percentile(real, at),
            modelled=1e3 * latency_percentile(model, at),
            requests=len(real),
        )
        for name, (real, model) in told.items()
        for at in _PERCENTILES
    ]
    busy = sum(pair.busy_s for pair in played)
    load = CostResidual(figure="busy_s", measured=_busy_s(blocks), modelled=busy, requests=len(measured))
    return (*found, load)


def _met_nobody(blocks: Sequence[Sequence[MeasuredRequest]]) -> Iterator[MeasuredRequest]:
    """Requests that came while nothing was inside."""
    for block in blocks:
        until = 0.0
        for one in block:
            if one.sent >= until:
                yield one
            until = max(until, one.last)


def _fit_prefill(blocks: Sequence[Sequence[MeasuredRequest]]) -> tuple[float, float]:
    """Seconds of a prompt, and of each of its tokens."""
    found = np.array([(1.0, one.prompt, one.first - one.sent) for one in _met_nobody(blocks)])
    return _robust(found[:, :2], found[:, 2])


def _fit_decode(blocks: Sequence[Sequence[MeasuredRequest]], prefill: tuple[float, float]) -> tuple[float, float]:
    """Seconds of a step in which requests decode, and of each of them. A request's later tokens take their steps, and
    the prompts that were read meanwhile."""
    rows: list[tuple[float, float]] = []
    times: list[float] = []
    for block in blocks:
        for one in block:
            if one.output < 2:
                continue
            others = [two for two in block if two is not one and two.first < one.last and two.last > one.first]
            met = [two for two in block if one.first < two.first <= one.last]
            beside = sum(min(one.last, two.last) - max(one.first, two.first) for two in others)
            read = sum(prefill[0] + prefill[1] * two.prompt for two in met)
            steps = one.output - 1
            batch = 1.0 + beside / max(1e-9, one.last - one.first)
            rows.append((float(steps), steps * batch))
            times.append(max(0.0, one.last - one.first - read))
    return _robust(np.array(rows), np.array(times))


def _centred(blocks: Sequence[Sequence[MeasuredRequest]], costs: PairCosts) -> PairCosts:
    """`costs` with the noise of single prompts, scaled so that it is noise around them: half of all prompts take
    longer. A request's later tokens take many steps, so their time is that of the noise's mean."""
    logs = np.array(
        [math.log(max(1e-9, one.first - one.sent) / costs.prefill(one.prompt)) for one in _met_nobody(blocks)]
    )
    middle = float(np.median(logs))
    # Of a normal distribution the median distance is this part of the deviation; hiccups hardly move it.
    noise = min(1.0, 1.4826 * float(np.median(np.abs(logs - middle))))
    prefill, decode = math.exp(middle), math.exp(-(noise**2) / 2)
    return replace(
        costs,
        prefill_s=costs.prefill_s * prefill,
        prefill_token_s=costs.prefill_token_s * prefill,
        decode_s=costs.decode_s * decode,
        decode_each_s=costs.decode_each_s * decode,
        noise=noise,
    )


def _robust(rows: Values, times: Values) -> tuple[float, float]:
    """Fit, leave the durations out that are longest against the fit, and fit again."""
    fit = _not_negative(rows, times)
    over = times / np.maximum(1e-9, rows @ np.array(fit))
    kept = over <= np.quantile(over, _KEPT)
    return _not_negative(rows[kept], times[kept])


def _not_negative(rows: Values, times: Values) -> tuple[float, float]:
    """Least squares of two costs. If one came out negative it is 0, and the other one is fitted alone."""
    found, *_ = np.linalg.lstsq(rows, times, rcond=None)
    if (found >= 0).all():
        return float(found[0]), float(found[1])
    squares = np.square(rows).sum(axis=0)
    alone = (rows.T @ times) / np.maximum(squares, 1e-12)
    errors = np.square(times[:, None] - rows * alone).sum(axis=0)
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))


def _busy_s(blocks: Sequence[Sequence[MeasuredRequest]]) -> float:
    total = 0.0
    for block in blocks:
        until = 0.0
        for one in sorted(block, key=lambda one: one.sent):
            total += max(0.0, one.last - max(until, one.sent))
            until = max(until, one.last)
    return total
