"""Decides how often workers may flush, so that their messages leave the coordinator time: those of a large fleet, and
those for many interactive rollouts.
"""

from typing import Final

from ebbtide.types.fleet import INTERACTIVE_FLUSH_S

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
    return _steadied(due, present_s) if due > _SMALL_S else 0.0


def interactive_interval_s(rollouts: int, *, most: int, batch_s: float, present_s: float) -> float:
    """The least time between two messages of a worker for its interactive rollouts, seconds; 0.0, which means 50 ms,
    while at most `most` of them are generated. With more it grows in proportion to them, up to the interval of batch
    rollouts. `most`: 0 without a limit; `batch_s`: the fleet's `flush_interval_s`; `present_s`: what workers were told
    last.
    """
    if not most or rollouts <= most:
        return 0.0
    return _steadied(min(INTERACTIVE_FLUSH_S * rollouts / most, max(_SMALL_S, batch_s)), present_s)


def _steadied(due_s: float, present_s: float) -> float:
    """What is due, unless the present interval is near enough."""
    return present_s if present_s / _STEP <= due_s <= present_s * _STEP else due_s
