"""Defines the options of `ebbtide demo coserving`, and makes its traffic from them."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.demo.coserving.request_traffic import (
    TraceLengths,
    TrafficBursts,
    TrafficRequest,
    faster,
    made_up,
    parse_window,
    read_trace,
)


class CoservingOptions(Struct, frozen=True, kw_only=True):
    run_dir: Path = Path("runs/demo-coserving")
    cache: Path = Path(".cache/base-models")
    seed: int | None = None
    gpus: str = ""  # a count or a list of those to use; empty: all
    steps: int = 16
    eval_problems: int = 160
    trace: Path | None = None
    window: str = "0:45"  # seconds of the trace, or of made-up traffic
    speed: Annotated[float, Meta(gt=0)] = 1.0  # factor on the trace's pace
    prompts: Annotated[float, Meta(gt=0)] = 0.25  # factor on the trace's prompt lengths
    outputs: Annotated[float, Meta(gt=0)] = 0.5  # factor on the trace's answer lengths


class CoservingTraffic(Struct, frozen=True, kw_only=True):
    requests: list[TrafficRequest]
    seconds: float  # that the requests fill
    what: str  # description for people


def traffic(options: CoservingOptions) -> CoservingTraffic:
    """Makes the users' requests. Raises `InvalidRequest` naming the option or file."""
    begin, end = parse_window(options.window, field="--window")
    seconds = (end - begin) / options.speed
    if options.trace is None:
        bursts = TrafficBursts()
        requests = faster(made_up(bursts, end - begin, options.seed or 0), options.speed)
        what = (
            f"made up: bursts of {bursts.size:g} requests on average, {bursts.apart_s:g} s apart, {bursts.quiet_s:g} s "
            f"between bursts, prompts of {bursts.prompt} tokens and answers of {bursts.output} (medians)"
        )
    else:
        lengths = TraceLengths(prompts=options.prompts, outputs=options.outputs)
        requests = faster(read_trace(options.trace, (begin, end), lengths), options.speed)
        scales = f"prompts x {options.prompts:g}, answers x {options.outputs:g}"
        what = f"{options.trace.name}, {begin:g} to {end:g} s, {scales}"
    pace = f", at {options.speed:g} times its pace" if options.speed != 1 else ""
    return CoservingTraffic(requests=requests, seconds=seconds, what=f"{what}{pace}")
