"""Fits how long a typical engine takes for a step, by its load and by the length of contexts: an `EnginePace`.

Its three parts are fitted to what workers were seen to take at different loads. A table by load alone does not do:
small loads are only seen in the tails of steps, where contexts are long.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ebbtide.types.remaining_work import EnginePace

#: What is seen for longer than this counts no more: engines that are seldom seen at some load count there too.
_MOST_WEIGHT_S: Final = 10.0
#: No engine of a pool is taken for slower than so small a part of a typical one, or for faster than its inverse.
_SLOWEST: Final = 0.05


class ThroughputPoint(NamedTuple):
    """What was seen of a worker at a range of concurrency: means of it, of the time between two tokens of a rollout in
    seconds, and of the context in tokens; the seconds for which it was seen, as far as they still count.
    """

    running: float
    token_s: float
    context: float
    seen_s: float


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
