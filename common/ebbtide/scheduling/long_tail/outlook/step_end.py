"""Says when a step ends, and how much each running rollout decides of that.

Times are in tokens of a rollout, as if all ran equally fast. What waits begins as slots become free. Until nothing
waits, each token of any rollout brings the step's end nearer; in the tail behind that, only those of the last ones do.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ebbtide.scheduling.long_tail.drafts.tail_criticality import LEAST_WORTH, ExpectedEnd, last_end, last_shares
from ebbtide.scheduling.long_tail.length_forecast import LengthOutlook

#: Rollouts whose ends are compared: those with the latest ones. The others hardly are the last.
COMPARED: Final = 128


class WaitingWork(NamedTuple):
    """What waits: the tokens to come of all, and those of the rollout that may become longest."""

    tokens: float = 0.0
    longest: LengthOutlook | None = None


class StepEnd(NamedTuple):
    """In tokens of a rollout from now on."""

    half: float  # with probability one half, the step has ended by then
    ninth: float  # with probability nine tenths
    tail: float  # share of the time until `half` in which nothing waits, 0 to 1


def step_end(last: Sequence[LengthOutlook], waiting: WaitingWork, running: int) -> StepEnd:
    """When all have ended. `last`: of those that run the ones that may end last, `COMPARED` of them; `running`: how
    many run. As many do so as long as anything waits.
    """
    drained = waiting.tokens / max(1, running)
    ends = [_end(one, 0.0) for one in last]
    if waiting.longest is not None:
        ends.append(_end(waiting.longest, drained))
    if not ends:
        return StepEnd(0.0, 0.0, 0.0)
    half, ninth = last_end(ends, 0.5), last_end(ends, 0.9)
    return StepEnd(half, ninth, 1.0 - min(1.0, drained / half) if half > 0.0 else 1.0)


def worths(last: Sequence[LengthOutlook], tail: float, running: int) -> list[float]:
    """The worth of a token of each of `last` for the step's end; that of an average one of all that run is 1, but for
    a least one. `tail`: see `StepEnd`. The others are worth as much as the least of these.
    """
    if tail <= 0.0 or not last:
        return [1.0] * len(last)
    shares = last_shares([_end(one, 0.0) for one in last])
    return [max(LEAST_WORTH, 1.0 - tail + tail * share * running) for share in shares]


def _end(one: LengthOutlook, begin: float) -> ExpectedEnd:
    return ExpectedEnd(begin + one.tenth, begin + one.half, begin + one.ninth)
