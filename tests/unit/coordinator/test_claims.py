"""Who asks for any run gets the one that waits for it."""

import math
from typing import Any

import pytest

from ebbtide.coordinator.api.runs import ClaimableRun, choose
from ebbtide.errors import NotReady


def run(run_id: str, holder: str = "", renewed_s: float = 0.0, *, paired: bool = False) -> ClaimableRun:
    return ClaimableRun(run_id=run_id, holder=holder, renewed_s=renewed_s, paired=paired)


def chosen(*runs: ClaimableRun, waited_s: float = math.inf) -> str:
    return choose(runs, role="trainer", holder="me", waited_s=waited_s)


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([run("old"), run("young")], "old"),
        ([run("old"), run("young", paired=True)], "young"),  # its driver is there
        ([run("old", paired=True), run("young", "me")], "young"),  # mine before
        ([run("old", "other"), run("young")], "young"),
        ([run("old", "other", paired=True), run("young", paired=True)], "young"),
    ],
)
def test_my_own_run_comes_first_then_one_whose_other_role_is_held_then_the_oldest(runs: Any, found: Any) -> None:
    assert chosen(*runs) == found


def test_a_younger_run_is_begun_only_once_the_holders_of_older_ones_have_shown_that_they_live() -> None:
    young = run("young")
    with pytest.raises(NotReady, match="other may have left run old"):
        chosen(run("old", "other", renewed_s=2.0), young, waited_s=1.0)
    assert chosen(run("old", "other", renewed_s=2.0), young, waited_s=2.5) == "young"
    assert chosen(young, run("younger", "other", renewed_s=2.0), waited_s=0.0) == "young"
    paired = run("paired", paired=True)
    assert chosen(run("old", "other", renewed_s=2.0), young, paired, waited_s=0.0) == "paired"


def test_where_no_run_wants_the_role_it_is_said() -> None:
    with pytest.raises(NotReady, match="no run wants a trainer"):
        chosen(run("old", "other", renewed_s=1.0))
