"""Defines pools of like machines. One machine carries one rollout worker with one engine."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from ebbtide.simulator.scenario.quantity_spec import (
    Dollars,
    EngineReference,
    Factor,
    Gbps,
    LongerThanZero,
    Machines,
    Name,
    PerHour,
    Reference,
    Seconds,
    Share,
    Tokens,
)


class SpotTraceSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recorded fleet: a file of events (`t_s,event,node`) or of counts (`t_s,count`), and which part of it is used.

    Machines are drawn first (`share`), then the window is cut, then times are scaled, then the cap applies.
    """

    shorthand: ClassVar[dict[type, str]] = {str: "file"}

    file: Reference
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of the trace's machines, each drawn by the seed with its history
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None  # of that draw; none: that of the simulation
    start_s: Seconds = 0.0  # the window's begin, in seconds of the trace
    span_s: Seconds = 0.0  # its length; 0: up to the trace's last row
    most: Machines | None = None  # machines at once; others wait, and come when one of these is gone
    time_scale: Factor = 1.0  # on the trace's times: 0.1 lets ten hours pass in one
    repeats: bool = False  # begins again at the window's end; otherwise what is there then stays


class GrantTapeSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the hosts of borrowed machines lend them: a file `t_s,share`, which begins again at its last row."""

    shorthand: ClassVar[dict[type, str]] = {str: "file"}

    file: Reference
    alike: bool = False  # all machines are at the same place in it; otherwise each begins at a drawn one


class MachinePool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Like machines of one kind: a `[[fleet]]` of the scenario."""

    name: Name
    kind: Literal["reserved", "spot", "borrowed", "trainer"] = "reserved"
    engine: EngineReference
    workers: Annotated[int, Meta(ge=1, le=20_000)] | None = None  # so many, or those of `trace`
    trace: SpotTraceSpec | None = None
    from_s: Seconds = 0.0  # the pool's first moment in the scenario
    until_s: Seconds | None = None  # its last one; none: the scenario's end

    slots: Annotated[int, Meta(ge=1, le=65_536)] = 64  # rollouts that a worker takes at once
    boot_s: Seconds = 60.0  # from the machine's start until its worker attaches, without the profile's `start_s`
    link_gbps: Gbps = 50.0
    speed_spread: Annotated[float, Meta(ge=0, lt=1)] = (
        0.0  # machines are up to so much faster or slower than the engine
    )
    flush_s: LongerThanZero = 0.25  # tokens go to the coordinator after so long,
    flush_tokens: Tokens = 32  # or when so many have gathered

    price_per_hour: Dollars = 0.0  # of one machine
    prices: Reference | None = None  # instead: a file `t_s,dollars_per_hour`; each price holds until the next row

    losses_per_hour: PerHour = 0.0  # of one machine, at random (Poisson), beside those of a trace
    replaced_s: Seconds | None = 120.0  # after such a loss another machine comes; none: never
    notice_s: Seconds = 0.0  # between a loss's notice and the loss
    unannounced: Share = 0.0  # losses that come without the notice
    stalls_per_hour: PerHour = 0.0  # of one machine, at random: it makes nothing for a while
    stall_s: LongerThanZero = 30.0

    grants: GrantTapeSpec | None = None  # of borrowed machines
    run: Name | None = None  # of kind "trainer": the run on whose trainer's machines these engines live
    window_s: Seconds | None = None  # they generate for so long in each step; none: until the step's rollouts ended
