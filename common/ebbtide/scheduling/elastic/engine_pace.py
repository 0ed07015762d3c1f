"""Fits how long a typical engine takes for a step, by its load and by the length of contexts.

A decoding step reads all weights once, does some work for each rollout, and reads each rollout's context. With L
rollouts of a mean context of C tokens it takes

    step_s + L (rollout_s + C context_s)

The three are fitted to what workers were seen to take at different loads. A table by load alone does not do: small
loads are only seen in the tails of steps, where contexts are long.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from ebbtide.scheduling.throughput import ThroughputPoint

#: What is seen for longer than this counts no more: engines that are seldom seen at some load count there too.
_MOST_WEIGHT_S: Final = 10.0
#: A step of an engine of which nothing is known: 30 tokens/s of each of 64 rollouts.
_UNKNOWN_STEP_S: Final = 0.02
_UNKNOWN_ROLLOUT_S: Final = 0.0002
#: No engine of a pool is taken for slower than so small a part of a typical one, or for faster than its inverse.
_SLOWEST: Final = 0.05
#: No step is shorter.
_LEAST_S: Final = 1e-6


class EnginePace(Struct, frozen=True, kw_only=True):
    """Parts of a step in seconds, none of them negative: of each step, of each rollout in it, and of each token of a
    rollout's context.
    """

    step_s: float = _UNKNOWN_STEP_S
    rollout_s: float = _UNKNOWN_ROLLOUT_S
    context_s: float = 0.0

    def seconds(self, load: float, context: float) -> float:
        """Of a step, and so of one token of each rollout. Loads below one are as fast as one."""
        return max(_LEAST_S, self.step_s + max(1.0, load) * (self.rollout_s + context * self.context_s))


def fitted_pace(points: Sequence[ThroughputPoint]) -> EnginePace:
    """The pace that fits best, by relative errors; what nothing is known of if there are no points."""
    if not points:
        return EnginePace()
    loads, seconds, contexts, seen_s = (np.array(column) for column in zip(*points, strict=True))
    weights = np.sqrt(np.minimum(seen_s, _MOST_WEIGHT_S)) / seconds
    parts = np.stack([np.ones(len(points)), loads, loads * contexts], axis=1) * weights[:, None]
    scale = np.maximum(np.abs(parts).max(axis=0), 1e-30)
    used = list(range(3))
    while True:
        found = np.linalg.lstsq(parts[:, used] / scale[used], seconds * weights, rcond=1e-6)[0] / scale[used]
        if len(used) == 1 or found.min() >= 0.0:
            break
        del used[int(found.argmin())]
    known = dict(zip(used, np.maximum(found, 0.0).tolist(), strict=True))
    return EnginePace(step_s=known.get(0, 0.0), rollout_s=known.get(1, 0.0), context_s=known.get(2, 0.0))


def relative_speed(points: Sequence[ThroughputPoint], typical: EnginePace) -> float:
    """How many times as fast as a typical engine one is, by what was seen of it at each load; 1.0 if nothing was."""
    seen_s = sum(point.seen_s for point in points)
    if seen_s <= 0.0:
        return 1.0
    took_s = sum(point.seen_s * point.token_s / typical.seconds(point.running, point.context) for point in points)
    return min(max(seen_s / max(took_s, 1e-9), _SLOWEST), 1.0 / _SLOWEST)
