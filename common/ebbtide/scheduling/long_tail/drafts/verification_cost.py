"""Learns what an engine's step costs by the number of tokens that it verifies.

A step verifies one token of each running sample, and all of their draft tokens. While it is bound by memory further
tokens cost little; beyond a knee each costs its share of the arithmetic. No formula is assumed: steps are averaged in
classes of like sizes, and averages that fall with size are joined by the pool-adjacent-violators rule (Ayer et al.,
Annals of Mathematical Statistics 26, 1955), so that costs never fall. The search for drafts is not part of it: only
steps that have drafts pay for that, which the planner counts.

Invariant: `_classes` has the faded sums of sizes and seconds. Lost with the process; some hundred steps teach it again.
"""

from bisect import bisect_left
from math import ceil, log2
from typing import Final

#: Classes of sizes for each doubling: a knee is found within a sixth.
_PER_DOUBLING: Final = 4
#: A class's mean is over about so many of its newest steps: contexts grow, and costs with them.
_MEMORY: Final = 64.0


class VerificationCost:
    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float, float]] = {}  # weight, sizes, seconds
        self._line: list[tuple[float, float]] | None = None

    @property
    def known(self) -> bool:
        """Whether steps of two classes were seen: one alone shows no slope."""
        return len(self._classes) > 1

    def reaches(self, tokens: int) -> bool:
        """Whether no steps of a class above this size were seen. Call only for a size of at least 1."""
        return _class_of(tokens) >= max(self._classes, default=0)

    def observe(self, tokens: int, seconds: float) -> None:
        """Note a step that verified so many tokens."""
        if tokens < 1 or not 0.0 < seconds < 1e4:
            return
        number = _class_of(tokens)
        weight, sizes, total = self._classes.get(number, (0.0, 0.0, 0.0))
        fade = 1.0 - 1.0 / _MEMORY
        self._classes[number] = fade * weight + 1.0, fade * sizes + tokens, fade * total + seconds
        self._line = None

    def seconds(self, tokens: float) -> float:
        """The time of a step that verifies so many tokens; it never falls with them. Between classes it is a straight
        line. Beyond the largest class tokens cost in proportion, as where arithmetic binds. Call only if a step was
        seen.
        """
        if self._line is None:
            self._line = self._joined()
        line = self._line
        if tokens <= line[0][0]:
            return line[0][1]
        high = bisect_left(line, (tokens, 0.0))
        if high == len(line):
            return line[-1][1] * tokens / line[-1][0]
        (begin, low), (end, up) = line[high - 1], line[high]
        return low + (up - low) * (tokens - begin) / (end - begin)

    def _joined(self) -> list[tuple[float, float]]:
        """Sizes and times that never fall."""
        pools = list[list[tuple[float, float, float]]]()
        for number in sorted(self._classes):
            pools.append([self._classes[number]])
            while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
                last = pools.pop()
                pools[-1] += last
        return [(sizes / weight, _mean(pool)) for pool in pools for weight, sizes, _ in pool]


def next_size(tokens: int) -> int:
    """A size whose class is above that of `tokens`."""
    size: int = ceil(tokens * 2.0 ** (1.0 / _PER_DOUBLING)) + 1
    return size


def _class_of(tokens: int) -> int:
    return round(_PER_DOUBLING * log2(tokens))


def _mean(pool: list[tuple[float, float, float]]) -> float:
    return sum(seconds for _, _, seconds in pool) / sum(weight for weight, _, _ in pool)
