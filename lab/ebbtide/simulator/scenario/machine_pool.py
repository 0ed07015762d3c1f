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

    #: Events (`t_s,event,node`, with `add` and `remove`) or counts (`t_s,count`). A count of 0 for hours is normal.
    file: Reference
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of the trace's machines, each drawn with its whole history
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None  # of that draw; none: that of the simulation
    start_s: Seconds = 0.0  # start of the window, in seconds of the trace
    span_s: Seconds = 0.0  # length of the window; 0: up to the trace's last row
    most: Machines | None = None  # machines at once; others wait, and come at the instant in which one is lost
    time_scale: Factor = 1.0  # on the trace's times: 0.1 lets ten hours pass in one
    repeats: bool = False  # start again at the window's end; otherwise the machines that are there then stay


class GrantTapeSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the hosts of borrowed machines lend them.

    Record a tape on a host of yours: `ebbtide guard status --json` says what its guard grants, and the share is the
    worker's tokens per second over those without users. In place of a guard's forecast, workers report to the
    coordinator what is usual in the tape.
    """

    shorthand: ClassVar[dict[type, str]] = {str: "file"}

    #: Rows `t_s,share`: the share of the worker's own speed from each second on; 0: its users have the device. The last
    #: row ends the tape, which then starts again.
    file: Reference
    alike: bool = False  # all machines are at the same place in the tape; otherwise each starts at a drawn one


class MachinePool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of homogeneous machines. Each carries one rollout worker with one engine."""

    name: Name  # part of the machines' names
    #: `"borrowed"`: lent by serving hosts. `"trainer"`: engines on a run's own trainer.
    kind: Literal["reserved", "spot", "borrowed", "trainer"] = "reserved"
    engine: EngineReference  # how fast it is: see engines and trainers
    workers: Annotated[int, Meta(ge=1, le=20_000)] | None = None  # fixed number of machines; this or `trace`
    trace: SpotTraceSpec | None = None  # recorded fleet: a file, or a table of its own keys
    from_s: Seconds = 0.0  # start of the pool in the scenario
    until_s: Seconds | None = None  # end of the pool; none: the scenario's end

    slots: Annotated[int, Meta(ge=1, le=65_536)] = 64  # rollouts that a worker takes at once
    boot_s: Seconds = 60.0  # from the machine's start until its worker attaches; a profile's `start_s` comes on top
    link_gbps: Gbps = 50.0  # link of each machine
    speed_spread: Annotated[float, Meta(ge=0, lt=1)] = (
        0.0  # machines differ from the engine's speed by up to this share
    )
    flush_s: LongerThanZero = 0.25  # after which a worker sends its tokens
    flush_tokens: Tokens = 32  # unsent tokens of a rollout at which it sends sooner

    price_per_hour: Dollars = 0.0  # dollars, of one machine
    prices: Reference | None = (
        None  # in place of `price_per_hour`: a file `t_s,dollars_per_hour`, each until the next row
    )

    losses_per_hour: PerHour = 0.0  # of one machine, at random (Poisson), in addition to those of a trace
    replaced_s: Seconds | None = 120.0  # after which another machine replaces one that was lost so; none: never
    notice_s: Seconds = 0.0  # between a loss's notice and the loss
    unannounced: Share = 0.0  # share of losses without notice
    stalls_per_hour: PerHour = 0.0  # of one machine, at random: times in which it generates nothing
    stall_s: LongerThanZero = 30.0  # length of such a time

    grants: GrantTapeSpec | None = None  # of borrowed machines: when their hosts lend them; a file, or a table
    run: Name | None = None  # of kind `"trainer"`: the run on whose trainer's machines these engines live
    #: Of kind `"trainer"`: how long the engines generate in each step; none: until the step's rollouts have ended.
    window_s: Seconds | None = None
