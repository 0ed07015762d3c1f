"""Decides when a trainer takes its device back from the engines that generate on it."""

from msgspec import Struct


class StepProgress(Struct, frozen=True, kw_only=True):
    """How far the rollouts of the next step are."""

    whole: int  # groups that have all their trajectories
    expected: int  # groups of the step that are not dropped


def take_back_due(progress: StepProgress) -> bool:
    """Whether the device is due. Nothing is left to generate for a step whose groups are all there, and until then
    engines on the device make groups whole sooner. There may be no other engines."""
    return progress.whole >= progress.expected
