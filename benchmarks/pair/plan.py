"""Which requests of a trace make a scene, how long, and how fast they come."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.pair.traffic import Speeds, lasting, speed_for
from ebbtide.demo.coserving.request_traffic import TraceLengths, TrafficRequest, faster, read_trace
from ebbtide.errors import InvalidRequest

#: A block is as short as this allows: long against a burst, short against the machine's moods. A quick one is shorter:
#: no policy has a single block, which one disturbance would hit whole.
BLOCK_S: Final = 120.0
QUICK_BLOCK_S: Final = 25.0
#: Seconds of a cell, in short and in full; the cells that matter most last for a number of requests.
QUICK_S, FULL_S = 50.0, 240.0
MOST_REQUESTS: Final = 1000
#: A median prompt takes so long alone, and a median answer has so many tokens.
MEDIAN_TTFT_S, MEDIAN_OUTPUT = 0.095, 16
#: The served engine holds 3072 tokens.
LONGEST_PROMPT: Final = 2560
_ROUNDS: Final = 4
_UNSCALED: Final = TraceLengths(prompts=1, outputs=1, longest_prompt=1 << 20, longest_output=1 << 20)


class Scene(Struct, frozen=True, kw_only=True):
    """`name` says trace and load."""

    name: str
    requests: list[TrafficRequest]

    def blocks(self, seconds: float = BLOCK_S) -> list[list[TrafficRequest]]:
        """The requests in stretches of about so many seconds, each counted from its own start."""
        end = self.requests[-1].at + 1e-9
        count = max(1, round(end / seconds))
        found: list[list[TrafficRequest]] = [[] for _ in range(count)]
        for one in self.requests:
            number = int(one.at / end * count)
            found[number].append(TrafficRequest(one.at - number * end / count, one.prompt, one.output))
        return [block for block in found if block]


def block_order(policies: Sequence[str], number: int) -> list[str]:
    """The order in which a block's policies are measured."""
    turn = number // 2 % max(1, len(policies))
    order = [*policies[turn:], *policies[:turn]]
    return order[::-1] if number % 2 else order


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
