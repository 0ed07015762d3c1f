"""Says in words why a worker goes over from one run to another, for the timelines of both."""

from msgspec import Struct


class LeftRun(Struct, frozen=True):
    """What a run has to do at the moment of a change."""

    waiting: int  # rollouts
    running: int


def change_reason(left: LeftRun | None) -> str:
    """The reason of a change. `left`: the run that the worker leaves, None if it has ended or there was none.

    Rollouts that run while none waits are a step's tail: they need fewer workers than the run has.
    """
    if left is None:
        return "no run had it"
    if left.waiting:
        return "by their shares"
    if left.running:
        return f"the last {left.running} rollouts of a step need fewer workers"
    return "no rollout is left between two steps"
