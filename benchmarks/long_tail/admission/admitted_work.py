"""Draws the work of the part `admission`: groups of rollouts whose lengths are fixed, and forecasts that err."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from random import Random
from typing import Final

#: Tokens that an engine gives memory for at a time.
BLOCK: Final = 32
#: Part of all final contexts that the memory holds.
MEMORY: Final = 0.25
GROUP: Final = 4
#: Logarithms of lengths: half of their variance is the group's.
_MEDIAN, _SPREAD, _SHARED = 160.0, 0.9, 0.5
_SHORTEST, _LONGEST = 8, 900
#: Spread of the logarithm of a forecast around the truth: about what is left where siblings tell the group's part.
_ERROR: Final = 0.5


@dataclass(frozen=True)
class WorkItem:
    """A rollout. Lengths in tokens."""

    name: str
    prompt: list[int]
    length: int
    forecast: int


def drawn_work(seed: int, groups: int) -> list[WorkItem]:
    """Rollouts in the order of their arrival, the samples of a group one after another."""
    draw, found = Random(f"{seed} admission"), list[WorkItem]()
    for group in range(groups):
        prompt = [draw.randrange(100) for _ in range(draw.randrange(32, 96))]
        shared = draw.gauss(0.0, 1.0)
        for sample in range(GROUP):
            z = _SHARED**0.5 * shared + (1.0 - _SHARED) ** 0.5 * draw.gauss(0.0, 1.0)
            length = round(min(_LONGEST, max(_SHORTEST, _MEDIAN * exp(_SPREAD * z))))
            forecast = round(min(_LONGEST, max(_SHORTEST, length * exp(_ERROR * draw.gauss(0.0, 1.0)))))
            found.append(WorkItem(f"g{group}.{sample}", prompt, length, forecast))
    return found


def memory_blocks(works: Sequence[Sequence[WorkItem]]) -> int:
    """Blocks that hold `MEMORY` of the final contexts of one work, on average."""
    tokens = sum(len(item.prompt) + item.length for work in works for item in work) / len(works)
    return round(MEMORY * tokens / BLOCK)


def packed_works(works: Sequence[Sequence[WorkItem]]) -> str:
    return json.dumps([[asdict(item) for item in work] for work in works])


def unpacked_works(text: str) -> list[list[WorkItem]]:
    return [[WorkItem(**item) for item in work] for work in json.loads(text)]
