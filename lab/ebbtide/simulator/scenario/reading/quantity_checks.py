"""Checks that a quantity states one distribution, and one that can be drawn from."""

from collections.abc import Iterator
from typing import TypeAlias

from ebbtide.checked_files.toml_places import TomlPath
from ebbtide.simulator.scenario.quantity_spec import QuantitySpec

#: Where something is wrong, and what.
Wrong: TypeAlias = tuple[TomlPath, str]


def quantity_problems(spec: QuantitySpec, most: float | None) -> Iterator[Wrong]:
    """Yield all problems, at paths below the quantity. `most`: a bound that the quantity's owner has."""
    cap = min(limit for limit in (spec.most, most, float("inf")) if limit is not None)
    yield from _family_problems(spec)
    if (spec.low is None) != (spec.high is None):
        yield ("low" if spec.low is not None else "high",), "state both low and high"
    elif spec.low is not None and spec.high is not None and spec.low > spec.high:
        yield ("low",), f"must be at most high, {spec.high:.12g}"
    if spec.least > cap:
        yield ("least",), f"must be at most {cap:.12g}, the longest"
    if spec.mean is not None and not spec.least < spec.mean < cap:
        yield ("mean",), f"must be between {spec.least:.12g} and {cap:.12g}, the least and the most"
    if spec.value is not None and not spec.least <= spec.value * spec.stretch <= cap:
        yield ("value",), f"must be from {spec.least:.12g} to {cap:.12g}, the least and the most"


def _family_problems(spec: QuantitySpec) -> Iterator[Wrong]:
    families = [name for name in ("value", "file", "low", "median") if getattr(spec, name) is not None]
    if len(families) > 1:
        yield (families[1],), f"states {' and '.join(families)}; they are different distributions, so keep one"
    if families and families != ["median"]:
        for name in ("sigma", "tail_sigma"):
            if getattr(spec, name):
                yield (name,), f"is for log-normal values, and {families[0]} states others; take one out"
    if spec.mean is not None:
        for name in ("value", "median"):
            if getattr(spec, name) is not None:
                yield (name,), f"both {name} and mean set the scale; take one out"
        if spec.stretch != 1.0:
            yield ("stretch",), "both stretch and mean set the scale; take one out"
    if not families and spec.mean is None:
        yield (), "state a value, a file, low and high, a median or a mean"
