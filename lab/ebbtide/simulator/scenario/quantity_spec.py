"""Bounds the numbers of a scenario, and defines how it states lengths, counts and waits that vary."""

from typing import Annotated, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from ebbtide.checked_files import OrTable
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
    """A distribution of one family: constant, table, uniform or log-normal. A number alone stands for a constant, and a
    text alone for a file.
    """

    shorthand: ClassVar[dict[type, str]] = {int: "value", float: "value", str: "file"}

    value: Amount | None = None  # a constant
    #: A table `quantile,VALUE` or `VALUE,cdf`, with VALUE one of `output_tokens`, `tokens`, `seconds`, `turns`,
    #: `value`; straight lines between its rows. What a cdf leaves out lies log-uniformly between its last value and the
    #: cap.
    file: Reference | None = None
    low: Amount | None = None  # lower end of a uniform distribution
    high: Amount | None = None  # its upper end
    median: Annotated[float, Meta(gt=0, le=1e9)] | None = (
        None  # of a log-normal: `median * exp(sigma * u)`, u standard normal
    )
    sigma: Spread | None = None  # of a log-normal
    tail_sigma: Spread = 0.0  # a heavier tail: above `tail_from` a factor `exp(tail_sigma * (u - tail_from))`
    tail_from: Annotated[float, Meta(ge=-5, le=5)] = 0.0  # the `u` at which that tail starts
    mean: Annotated[float, Meta(gt=0, le=1e9)] | None = (
        None  # scale of a file or log-normal, under `least`, `most` and cap
    )
    stretch: Factor = 1.0  # factor on all values, before `least` and `most`
    least: Amount = 0.0  # lower bound of the values
    most: Amount | None = None  # upper bound of the values


class LengthSpec(QuantitySpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Response lengths in tokens: a quantity, and how far the prompt decides them.

    Lengths are drawn by a Gaussian copula, which leaves the distribution as it is: each is a quantile of
    `u = sqrt(c) z + sqrt(1 - c) e`, with `z` the prompt's and `e` the sample's own standard normal, and c the
    `correlation`. Over epochs a prompt's `z` has the correlation `repeats` with its earlier ones.
    """

    #: Intraclass correlation of the samples of a prompt: the share of the variance of `u` that they have in common.
    #: Papers report a strong one and no coefficient (Seer, section 2), so the default is an assumption: compare
    #: several.
    correlation: Share = 0.5
    #: Share of the responses that never end by themselves, as in loops: they run into any cap. They are those with the
    #: greatest `u`, of the prompts whose responses are long.
    endless: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    #: Correlation of a prompt's part over epochs: a policy changes little from one to the next. An assumption, too.
    repeats: Share = 0.8


#: Responses to mathematical problems at a cap of 16k, fitted to RollPacker's Figure 2a: median 660 tokens, 5 % above
#: 4k. A log-normal with a heavier tail.
MATH_RESPONSES: Final = LengthSpec(median=658.5, sigma=0.78, tail_sigma=0.95, tail_from=1.05)
