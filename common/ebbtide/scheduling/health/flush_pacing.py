"""Decides how often the workers of a large fleet may flush, so that their messages leave the coordinator time."""

from typing import Final

#: At this interval all workers flush by default. A fleet that may flush so often is told nothing.
_SMALL_S: Final = 0.25
#: A lost worker loses what it made in about so long: not more, however large the fleet.
_LONGEST_S: Final = 4.0
#: A smaller change is not worth a message to each worker.
_STEP: Final = 1.25


def flush_interval_s(workers: int, *, per_s: float, present_s: float) -> float:
    """The least time between two flushes of a worker, seconds; 0.0 where the fleet is small. `per_s`: flushes of all
    workers together in a second, 0 without a limit. `present_s`: what workers were told last.
    """
    due = min(_LONGEST_S, workers / per_s) if per_s else 0.0
    if due <= _SMALL_S:
        return 0.0
    return present_s if present_s / _STEP <= due <= present_s * _STEP else due
