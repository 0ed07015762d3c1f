"""Bounds the numbers of a scenario, and defines how it states lengths, counts and waits that vary."""

from typing import Annotated, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from ebbtide.checked_files.record_check import OrTable
from ebbtide.simulator.engines.roofline import EngineOn, TrainerOn

#: Rollouts of one step, over all of its groups: the simulator holds them all at once.
MOST_STEP_ROLLOUTS: Final = 1_000_000
#: Names of pools and runs become parts of workers' and rollouts' ids.
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Label: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
#: A file relative to the scenario's folder, or the name of a profile that is derived or comes with the simulator.
Reference: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
EngineReference: TypeAlias = Annotated[Reference, OrTable(EngineOn)]
TrainerReference: TypeAlias = Annotated[Reference, OrTable(TrainerOn)]
#: 1e8 s are three years.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e8)]
LongerThanZero: TypeAlias = Annotated[float, Meta(gt=0, le=1e8)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
#: A factor on lengths, times or rates.
Factor: TypeAlias = Annotated[float, Meta(ge=1e-4, le=1e4)]
#: A machine that is lost every minute never gets anything done.
PerHour: TypeAlias = Annotated[float, Meta(ge=0, le=60)]
Dollars: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
Gbps: TypeAlias = Annotated[float, Meta(gt=0, le=1e5)]
Machines: TypeAlias = Annotated[int, Meta(ge=0, le=20_000)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=16 << 20)]


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
