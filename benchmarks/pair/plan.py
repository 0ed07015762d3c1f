"""Which requests of a trace make a scene, how long, and how fast they come."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.pair.level import Scene
from benchmarks.pair.traffic import Speeds, lasting, speed_for
from ebbtide.errors import InvalidRequest
from ebbtide.simulator.serving.request_traffic import TraceLengths, TrafficRequest, faster, read_trace

#: Seconds of a cell, in short and in full; the cells that matter most last for a number of requests.
QUICK_S, FULL_S = 50.0, 240.0
MOST_REQUESTS: Final = 1000
#: A median prompt takes so long alone, and a median answer has so many tokens.
MEDIAN_TTFT_S, MEDIAN_OUTPUT = 0.095, 16
#: The served engine holds 3072 tokens.
LONGEST_PROMPT: Final = 2560
_ROUNDS: Final = 4
_UNSCALED: Final = TraceLengths(prompts=1, outputs=1, longest_prompt=1 << 20, longest_output=1 << 20)


def lengths_for(raw: Sequence[TrafficRequest], speeds: Speeds) -> TraceLengths:
    """Factors by which the trace's median prompt and answer become what this engine is to be measured with."""
    prompt = statistics.median(one.prompt for one in raw)
    output = statistics.median(one.output for one in raw)
    tokens = (MEDIAN_TTFT_S - speeds.fixed_s) / speeds.prompt_s
    return TraceLengths(
        prompts=round(tokens / prompt, 3),
        outputs=round(min(1.0, MEDIAN_OUTPUT / output), 3),
        longest_prompt=LONGEST_PROMPT,
    )


def scene_of(options: argparse.Namespace, path: Path, load: int, speeds: Speeds) -> tuple[Scene, TraceLengths]:
    """The scene of one trace at one load (percent; 0: at the speed that the options name)."""
    raw = read_trace(path, options.window, _UNSCALED)
    lengths = lengths_for(raw, speeds)
    for _ in range(_ROUNDS):  # how many requests there are follows from their lengths, and these from those
        requests = _arriving(options, path, load, speeds, lengths)
        lengths = lengths_for(raw[: len(requests)], speeds)
    requests = _arriving(options, path, load, speeds, lengths)
    if len(requests) < 2:
        raise InvalidRequest("leaves fewer than two requests of the trace: widen it", field="--window, --seconds")
    return Scene(name=f"{path.stem.removeprefix('serving_azure2023_')}-{load}", requests=requests), lengths


def _arriving(
    options: argparse.Namespace, path: Path, load: int, speeds: Speeds, lengths: TraceLengths
) -> list[TrafficRequest]:
    requests = read_trace(path, options.window, lengths)
    if options.speed:
        requests = faster(requests, options.speed)
        return [one for one in requests if one.at <= (options.seconds or 1e9)][: options.requests]
    if options.requests or (not options.quick and not options.seconds and "code" in path.name and load < 80):
        requests = requests[: options.requests or MOST_REQUESTS]
        return faster(requests, speed_for(requests, load / 100, speeds))
    return lasting(requests, load / 100, speeds, options.seconds or (QUICK_S if options.quick else FULL_S))
