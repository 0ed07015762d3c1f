"""Says when a step ends, and how much each running rollout decides of that.

Times are in tokens of a rollout, as if all ran equally fast. What waits begins as slots become free. Until nothing
waits, each token of any rollout brings the step's end nearer; in the tail behind that, only those of the last ones do.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook
from ebbtide.scheduling.long_tail.tail_criticality import ExpectedEnd, last_end, tail_worths

#: Rollouts whose ends are compared: those with the latest ones. The others hardly are the last.
_COMPARED: Final = 128


class WaitingWork(NamedTuple):
    """What waits: the tokens to come of all, and those of the rollout that may become longest."""

    tokens: float = 0.0
    longest: LengthOutlook | None = None


class StepEnd(NamedTuple):
    """In tokens of a rollout from now on."""

    half: float  # with probability one half, the step has ended by then
    ninth: float  # with probability nine tenths
    tail: float  # share of the time until `half` in which nothing waits, 0 to 1


def step_end(running: Sequence[LengthOutlook], waiting: WaitingWork) -> StepEnd:
    """When all have ended. As many run at once as now, while anything waits."""
    drained = waiting.tokens / max(1, len(running))
    ends = [_end(one, 0.0) for one in latest(running)]
    if waiting.longest is not None:
        ends.append(_end(waiting.longest, drained))
    if not ends:
        return StepEnd(0.0, 0.0, 0.0)
    half, ninth = last_end(ends, 0.5), last_end(ends, 0.9)
    return StepEnd(half, ninth, 1.0 - min(1.0, drained / half) if half > 0.0 else 1.0)


def worths(running: Sequence[LengthOutlook], tail: float) -> list[float]:
    """The worth of a token of each running rollout for the step's end: 1 on average, but for a least one. `tail`: see
    `StepEnd`.
    """
    if tail <= 0.0:
        return [1.0] * len(running)
    order = sorted(range(len(running)), key=lambda at: running[at].ninth, reverse=True)
    compared = order[:_COMPARED]
    found = tail_worths([_end(running[at], 0.0) for at in compared], tail)
    least = min(found)
    worth = [least] * len(running)
    for at, one in zip(compared, found, strict=True):
        worth[at] = one
    return worth


def latest(running: Sequence[LengthOutlook]) -> Sequence[LengthOutlook]:
    """Those that may end last."""
    if len(running) <= _COMPARED:
        return running
    return sorted(running, key=lambda one: one.ninth, reverse=True)[:_COMPARED]


def _end(one: LengthOutlook, begin: float) -> ExpectedEnd:
    return ExpectedEnd(begin + one.tenth, begin + one.half, begin + one.ninth)
