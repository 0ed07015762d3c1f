"""Distributions of response lengths that forecasts are tried on, and groups that are drawn from them.

Recorded ones are looked for beside the checkout, in `shared/traces`. One needs no file: RollPacker's mathematical
responses, as fitted by the simulator.
"""

import csv
from collections.abc import Callable, Iterator
from functools import cache
from math import log, sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Final, NamedTuple

from ebbtide.simulator.scenario.input_tables import QuantileTable, read_quantiles
from ebbtide.simulator.scenario.quantity_spec import MATH_RESPONSES, QuantitySpec
from ebbtide.simulator.scenario.workload import Curve, curve

TRACES: Final = Path(__file__).parents[4] / "shared" / "traces"
#: Files of quantiles, with the cap under which the lengths were recorded.
_TABLES: Final = {"response_length_deepseek_r1_quantiles": 32_768, "response_length_math_cdf_upto4k": 16_384}
#: Recorded requests, with the longest response among them.
_REQUESTS: Final = {"serving_azure2023_conv": 1_000}
_MATH_CAP: Final = 16_384
_NORMAL: Final = NormalDist()
#: Shares at whose middles moments are computed.
_GRID: Final = 512
#: Hermite polynomials whose share in a curve is told apart. The rest counts as the next one.
_ORDERS: Final = 8


class NamedMarginal(NamedTuple):
    """`length`: tokens by a standard normal value; `cap`: the longest response."""

    name: str
    length: Curve
    cap: int

    def groups(self, draw: Random, count: int, size: int, correlation: float) -> list[list[int]]:
        """Groups whose samples' logarithms of lengths have a correlation: a Gaussian copula."""
        normals = list(self.normals(draw, count, correlation))
        return [[self.sample(draw, *normal) for _ in range(size)] for normal in normals]

    def normals(self, draw: Random, count: int, correlation: float) -> Iterator[tuple[float, float]]:
        """For each group what its samples have in common, and the deviation of samples around it."""
        share = copula_share(self.length, correlation)
        for _ in range(count):
            yield sqrt(share) * draw.gauss(), sqrt(1.0 - share)

    def sample(self, draw: Random, shared: float, within: float) -> int:
        """One response of a group."""
        return max(1, round(self.length(shared + within * draw.gauss())))


@cache
def known_marginals(folder: Path | None = None) -> tuple[NamedMarginal, ...]:
    """The fitted one, and those whose files are in `folder` (`TRACES`, if it is None)."""
    folder = TRACES if folder is None else folder
    found = [NamedMarginal("rollpacker_math_fit", curve(MATH_RESPONSES, {}, _MATH_CAP), _MATH_CAP)]
    for name, cap in _TABLES.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            tables = {name: read_quantiles(path, name)}
            found.append(NamedMarginal(name, curve(QuantitySpec(file=name), tables, cap), cap))
    for name, cap in _REQUESTS.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            tables = {name: _recorded(path)}
            found.append(NamedMarginal(name, curve(QuantitySpec(file=name), tables, cap), cap))
    return tuple(found)


def marginal_named(name: str, folder: Path | None = None) -> NamedMarginal:
    return next(one for one in known_marginals(folder) if one.name == name)


@cache
def copula_share(length: Curve, correlation: float) -> float:
    """The correlation of normal values under which the logarithms of lengths have this one. A curve is a sum of Hermite
    polynomials, and the k-th one's correlation is the k-th power (Mehler's formula).
    """
    values = [_NORMAL.inv_cdf((index + 0.5) / _GRID) for index in range(_GRID)]
    logs = [log(max(1.0, length(value))) for value in values]
    mean = fmean(logs)
    total = fmean((one - mean) ** 2 for one in logs)
    parts, before, now = list[float](), [1.0] * _GRID, values
    for order in range(1, _ORDERS + 1):  # normalised: h(k+1) = (x h(k) - sqrt(k) h(k-1)) / sqrt(k+1)
        parts.append(fmean(one * part for one, part in zip(logs, now, strict=True)) ** 2 / total)
        following = [
            (value * one - sqrt(order) * last) / sqrt(order + 1)
            for value, one, last in zip(values, now, before, strict=True)
        ]
        before, now = now, following
    parts.append(max(0.0, 1.0 - sum(parts)))
    return _root(lambda share: sum(part * share ** (at + 1) for at, part in enumerate(parts)) - correlation)


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return 0.5 * (low + high)


def _recorded(path: Path) -> QuantileTable:
    """Quantiles of the responses of recorded requests."""
    with path.open(newline="") as lines:
        lengths = sorted(float(row["output_tokens"]) for row in csv.DictReader(lines))
    shares = tuple((index + 0.5) / len(lengths) for index in range(len(lengths)))
    return QuantileTable(shares, tuple(lengths), continued=True)
