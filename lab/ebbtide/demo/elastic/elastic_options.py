"""Defines the options of `ebbtide demo elastic`, and plans its machines from them: cores, and who has them when."""

import os
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from ebbtide.demo.coserving.request_traffic import parse_window
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.scenario.input_tables import SpotTrace, read_spot_trace
from ebbtide.simulator.scenario.machine_events import Presence, presences
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec

#: Longer than any run of the demo.
_HORIZON_S: Final = 6 * 3600.0
_BUNDLED: Final = "spot_machines.csv"
#: Of one H100 per hour, on demand and spot, as RLBoost was priced (arXiv 2510.19225): 83.79 for eight, 5.32 for two.
RESERVED_PRICE, SPOT_PRICE = 10.47, 2.66

Price = Annotated[float, Meta(ge=0)]


class ElasticOptions(Struct, frozen=True, kw_only=True):
    run_dir: Path = Path("runs/demo-elastic")
    cache: Path = Path(".cache/base-models")
    spec: Path | None = None
    seed: int | None = None
    gpus: str = ""  # a count or a list of those to use; empty: all
    steps: Annotated[int, Meta(ge=2)] = 14  # the first one is not counted
    eval_problems: int = 0
    trace: Path | None = None
    window: str = ""  # seconds of the trace; empty: all of it
    speed: Annotated[float, Meta(gt=0)] = 60.0  # seconds of the trace that pass in one
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of the trace's machines
    notice_s: Annotated[float, Meta(ge=0)] = 2.0  # before a loss; 0: none
    fixed: Literal["reserved", "spot"] = "reserved"  # machines of the pool that lends nothing
    reserved_price: Price = RESERVED_PRICE  # of a machine per hour
    spot_price: Price = SPOT_PRICE


class MachinePlan(Struct, frozen=True, kw_only=True):
    """The machines of both pools: a core each."""

    device_core: int  # the trainer's device
    cores: tuple[int, ...]  # of workers
    stays: tuple[Presence, ...]  # of spot machines, in order of begin; seconds since the run's submission
    what: str  # for people

    @property
    def at_begin(self) -> int:
        """Machines that are there when the run begins."""
        return sum(stay.begin_s <= 0 for stay in self.stays)


def plan_machines(options: ElasticOptions, *, gpus: int = 0) -> MachinePlan:
    """Plans the machines. With `gpus` each has one of its own beside the trainer's, or a single one is shared by all.

    Raises `InvalidRequest` naming the option, the file or what the machine lacks.
    """
    device, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise InvalidRequest("the trainer's device and a worker need a core each; run it on two cores", field="cores")
    trace, name = _trace(options)
    stays = spot_stays(options, trace, most=min(len(others), max(1, gpus - 1)) if gpus else len(others))
    if not stays:
        raise InvalidRequest("no machine is there in this part of the trace; name another", field="--window")
    pace = f"{options.speed:g} s of it in a second"
    part = f", seconds {options.window}" if options.window else ""
    kept = f", {options.share:.0%} of its machines" if options.share < 1 else ""
    cores = tuple(others[: most_at_once(stays)])
    what = f"{name}{part}{kept}, {pace}, at most {len(cores)} at once, again and again"
    return MachinePlan(device_core=device, cores=cores, stays=stays, what=what)


def spot_stays(options: ElasticOptions, trace: SpotTrace, *, most: int) -> tuple[Presence, ...]:
    """Returns who is there when, at most so many machines at once. The trace's part begins again at its end."""
    start_s, end_s = parse_window(options.window, field="--window") if options.window else (0.0, trace.end_s)
    spec = SpotTraceSpec(
        file="trace",
        share=options.share,
        start_s=start_s,
        span_s=end_s - start_s,
        most=most,
        time_scale=1 / options.speed,
        repeats=True,
    )
    pool = MachinePool(name="spot", kind="spot", engine="vllm", trace=spec)
    return tuple(presences(pool, {spec.file: trace}, _HORIZON_S, options.seed or 0))


def most_at_once(stays: tuple[Presence, ...]) -> int:
    """Returns the number of machines that are there together at most; one that comes as another goes is not."""
    changes = sorted([(stay.begin_s, 1) for stay in stays] + [(stay.end_s, -1) for stay in stays])
    there = most = 0
    for _, change in changes:
        there += change
        most = max(most, there)
    return most


def _trace(options: ElasticOptions) -> tuple[SpotTrace, str]:
    if options.trace is not None:
        return read_spot_trace(options.trace, str(options.trace)), options.trace.name
    with as_file(files(__package__).joinpath(_BUNDLED)) as path:
        return read_spot_trace(path, _BUNDLED), "a made-up trace"
