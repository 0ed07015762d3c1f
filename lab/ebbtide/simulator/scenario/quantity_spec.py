"""Defines how a scenario states lengths, counts and waits that vary."""

from typing import Annotated, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from ebbtide.simulator.scenario.bounds import Factor, Reference, Share

#: Tokens, turns or seconds.
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Spread: TypeAlias = Annotated[float, Meta(ge=0, le=5)]


class QuantitySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of one family: constant, table, uniform or log-normal.

    In a scenario a number alone stands for a constant, and a text alone for a file.
    A log-normal value is `median * exp(sigma * u)` for a standard normal `u`. Above `tail_from` it is also multiplied
    by `exp(tail_sigma * (u - tail_from))`, a heavier tail.
    """

    shorthand: ClassVar[dict[type, str]] = {int: "value", float: "value", str: "file"}

    value: Amount | None = None  # a constant
    file: Reference | None = None  # a table `quantile,VALUE` or `VALUE,cdf`; straight lines between its rows
    low: Amount | None = None  # uniform from here
    high: Amount | None = None  # to here
    median: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    sigma: Spread | None = None
    tail_sigma: Spread = 0.0
    tail_from: Annotated[float, Meta(ge=-5, le=5)] = 0.0
    mean: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # of the values between `least` and `most`: sets the scale
    stretch: Factor = 1.0  # of all values, before `least` and `most`
    least: Amount = 0.0
    most: Amount | None = None


class LengthSpec(QuantitySpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Response lengths in tokens: their distribution, and how far the prompt decides them.

    Lengths are drawn by a Gaussian copula: each is a quantile of `u = sqrt(c) z + sqrt(1 - c) e`, with `z` the prompt's
    and `e` the sample's own standard normal, and c the `correlation`. Over epochs a prompt's `z` has the correlation
    `repeats` with its earlier ones.
    """

    #: Share of the variance of `u` that the samples of a prompt have in common. Papers report a strong correlation
    #: within groups and no coefficient (Seer, section 2), so one half is an assumption.
    correlation: Share = 0.5
    #: Share of the responses that never end by themselves, as in loops: they run into the cap. Trainers know it as the
    #: share of responses that were cut, if the cap is far beyond the others. Those with the greatest `u` are endless.
    endless: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    #: A policy changes little from epoch to epoch, so prompts keep most of their difficulty. An assumption, too.
    repeats: Share = 0.8


#: Responses to mathematical problems at a cap of 16k, fitted to RollPacker's Figure 2a: median 660 tokens, 5 % above
#: 4k. A log-normal with a heavier tail.
MATH_RESPONSES: Final = LengthSpec(median=658.5, sigma=0.78, tail_sigma=0.95, tail_from=1.05)
