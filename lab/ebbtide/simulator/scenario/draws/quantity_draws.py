"""Turns a `QuantitySpec` into a function from a standard normal to a value."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import exp, inf, sqrt
from statistics import NormalDist
from typing import Final, TypeAlias

from ebbtide.simulator.scenario.inputs.quantile_table import QuantileTable
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec

#: Value of a standard normal `u`: it rises with `u`.
Curve: TypeAlias = Callable[[float], float]
_NORMAL: Final = NormalDist()
#: Shares at whose middles a mean is computed: with 4,096 of them the tail's share beyond the last is 1e-4.
_GRID: Final = 4096
#: A scale is found between these factors of the median.
_SCALES: Final = (1e-6, 1e6)
#: Of a log-normal whose spread nobody stated: that of RollPacker's responses without their tail.
_SIGMA: Final = 0.78


def curve(spec: QuantitySpec, tables: Mapping[str, QuantileTable], most: float | None = None) -> Curve:
    """Make the function. Values lie between `spec.least` and the lesser of `spec.most` and `most`."""
    cap = min(limit for limit in (spec.most, most, inf) if limit is not None)
    shape = _shape(spec, tables, cap)
    if isinstance(spec, LengthSpec) and spec.endless:
        shape = _with_endless(shape, spec.endless)
    scale = spec.stretch if spec.mean is None else _scale_of_mean(shape, spec.mean, spec.least, cap)
    least = spec.least

    def value(u: float) -> float:
        return min(cap, max(least, scale * shape(u)))

    return value


def mean_of(quantity: Curve) -> float:
    """The mean over a grid of shares."""
    return sum(quantity(u) for u in _GRID_NORMALS) / _GRID


_GRID_NORMALS: Final = tuple(_NORMAL.inv_cdf((index + 0.5) / _GRID) for index in range(_GRID))


def _shape(spec: QuantitySpec, tables: Mapping[str, QuantileTable], cap: float) -> Curve:
    if spec.value is not None:
        constant = spec.value
        return lambda _: constant
    if spec.file is not None:
        table, ends = tables[spec.file], None if cap == inf else cap / spec.stretch
        return lambda u: table.at(_NORMAL.cdf(u), ends)
    if spec.low is not None and spec.high is not None:
        low, width = spec.low, spec.high - spec.low
        return lambda u: low + width * _NORMAL.cdf(u)
    return _log_normal(spec)


def _with_endless(shape: Curve, share: float) -> Curve:
    """The greatest values are without end."""
    first = _NORMAL.inv_cdf(1.0 - share)
    return lambda u: shape(u) if u < first else inf


def _log_normal(spec: QuantitySpec) -> Curve:
    median, sigma = spec.median or 1.0, _SIGMA if spec.sigma is None else spec.sigma
    tail_sigma, tail_from = spec.tail_sigma, spec.tail_from
    return lambda u: median * exp(sigma * u + tail_sigma * max(0.0, u - tail_from))


def _scale_of_mean(shape: Curve, mean: float, least: float, cap: float) -> float:
    """Find the factor under which the values' mean between `least` and `cap` is `mean`, by bisection."""
    values = [shape(u) for u in _GRID_NORMALS]  # they rise with `u`
    sums = [0.0, *accumulate(values)]
    low, high = (factor * mean / max(values[_GRID // 2], 1e-9) for factor in _SCALES)
    while high / low > 1.0 + 1e-6:
        factor = sqrt(low * high)
        short, long = bisect_left(values, least / factor), bisect_left(values, cap / factor)
        found = short * least + factor * (sums[long] - sums[short]) + (_GRID - long) * min(cap, 1e300)
        low, high = (factor, high) if found < mean * _GRID else (low, factor)
    return sqrt(low * high)
