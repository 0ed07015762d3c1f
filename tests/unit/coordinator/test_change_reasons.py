"""A change of run is explained by what the run that loses the worker had to do."""

import pytest

from ebbtide.coordinator.rules.fair_share import LeftRun, change_reason


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (None, "no run had it"),
        (LeftRun(waiting=3, running=64), "by their shares"),
        (LeftRun(waiting=0, running=7), "the last 7 rollouts of a step need fewer workers"),
        (LeftRun(waiting=0, running=0), "no rollout is left between two steps"),
    ],
)
def test_a_change_is_explained(left: LeftRun | None, reason: str) -> None:
    assert change_reason(left) == reason
