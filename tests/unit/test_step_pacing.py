"""Laws of pacing, over all small cases."""

import itertools

import pytest

from ebbtide.errors import VersionUnavailable
from ebbtide.step_pacing import (
    evaluation_steps,
    first_announced,
    open_steps,
    pinned,
    training_bounds,
)


def announced(count: int, start: int = 1) -> dict[int, int]:
    return {step: start + step for step in range(count)}


def test_nothing_is_open_before_the_first_version() -> None:
    assert list(open_steps({}, steps=5, max_staleness=3)) == []


@pytest.mark.parametrize("staleness", range(4))
def test_generation_is_ahead_of_training_by_at_most_the_staleness_and_ends_with_the_run(staleness: int) -> None:
    for known in range(1, 7):
        steps = open_steps(announced(known), steps=5, max_staleness=staleness)
        newest = known - 1
        assert list(steps) == [step for step in range(5) if step - newest <= staleness]


@pytest.mark.parametrize("staleness", range(4))
def test_every_open_step_has_bounds_and_no_token_is_staler_than_allowed_when_trained(staleness: int) -> None:
    for known in range(1, 7):
        versions = announced(known)
        for step in open_steps(versions, steps=6, max_staleness=staleness):
            bounds = training_bounds(versions, step=step, max_staleness=staleness)
            oldest_step = bounds.minimum - 1
            assert step - oldest_step <= staleness
            assert bounds.maximum == (bounds.minimum if staleness == 0 else 0)


@pytest.mark.parametrize("staleness", range(4))
def test_bounds_do_not_change_when_more_versions_come_or_a_resumed_trainer_announces_again(staleness: int) -> None:
    seen: dict[int, tuple[int, int]] = {}
    versions: dict[int, int] = {}
    for announcement in [(1, 0), (2, 1), (4, 2), (6, 1), (7, 2), (8, 3)]:
        versions = dict(first_announced(versions, announcement))
        for step in open_steps(versions, steps=9, max_staleness=staleness):
            bounds = training_bounds(versions, step=step, max_staleness=staleness)
            assert seen.setdefault(step, bounds) == bounds
    assert versions == {0: 1, 1: 2, 2: 4, 3: 8}


def test_a_trainer_that_skips_steps_still_opens_and_bounds_all_of_them() -> None:
    versions = {0: 1, 4: 2}
    for step in open_steps(versions, steps=9, max_staleness=0):
        assert training_bounds(versions, step=step, max_staleness=0) == ((1, 1) if step == 0 else (2, 2))


def test_a_step_that_is_not_open_has_no_bounds() -> None:
    with pytest.raises(VersionUnavailable, match="step 3"):
        pinned({0: 1}, step=3)


def test_evaluations_come_before_the_first_step_after_the_last_and_evenly_between() -> None:
    assert evaluation_steps(steps=10, every=0) == (0, 10)
    for steps, every in itertools.product(range(1, 12), range(1, 12)):
        plan = evaluation_steps(steps=steps, every=every)
        assert (plan[0], plan[-1]) == (0, steps)
        assert list(plan) == sorted(set(plan))
        assert all(step % every == 0 for step in plan[:-1])
