"""Deals a step's samples to minibatches (one optimiser step each), ranks, and micro-batches (one backward each).

It knows no tensor, so a simulation deals the same way.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Protocol, TypeVar


class Dealt(Protocol):
    @property
    def length(self) -> int:
        """Tokens of prompt and response."""


S = TypeVar("S", bound=Dealt)


def minibatches(samples: Sequence[S], count: int, rng: Random) -> list[list[S]]:
    """Shuffles the samples, and deals them into at most `count` parts of nearly equal size."""
    order = list(samples)
    rng.shuffle(order)
    return [part for start in range(count) if (part := order[start::count])]


def shares(samples: Sequence[S], ranks: int) -> list[list[S]]:
    """Deals the samples to ranks with like token counts: the longest first, each to the rank with the fewest tokens.

    All ranks compute the same deal. One rank gets all samples in their order.
    """
    if ranks == 1:
        return [list(samples)]
    dealt: list[list[S]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for sample in sorted(samples, key=lambda sample: sample.length, reverse=True):
        poorest = tokens.index(min(tokens))
        dealt[poorest].append(sample)
        tokens[poorest] += sample.length
    return dealt


def micro_parts(samples: Sequence[S], max_tokens: int, *, packed: bool = False) -> Iterator[list[S]]:
    """Returns the samples of each micro-batch: at most `max_tokens` tokens, or one sample that has more.

    Tokens of padding count, so that samples of a micro-batch are of like lengths. `packed`: there is none, and the
    longest sample left goes where it fits first (first-fit decreasing).
    """
    if packed:
        yield from _fitted(samples, max_tokens)
        return
    part: list[S] = []
    for sample in sorted(samples, key=lambda sample: sample.length):
        if part and (len(part) + 1) * sample.length > max_tokens:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def _fitted(samples: Sequence[S], max_tokens: int) -> list[list[S]]:
    parts: list[list[S]] = []
    left: list[int] = []
    for sample in sorted(samples, key=lambda sample: sample.length, reverse=True):
        place = next((number for number, room in enumerate(left) if sample.length <= room), len(parts))
        if place == len(parts):
            parts.append([])
            left.append(max_tokens)
        parts[place].append(sample)
        left[place] -= sample.length
    return parts
