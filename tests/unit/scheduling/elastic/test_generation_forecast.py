"""When the groups of a step are foreseen to be complete."""

from math import inf

import pytest

from ebbtide.scheduling.elastic.generation_forecast import EngineTerms, ForecastRollout, forecast_groups


def terms(remote: float, local: float = 0.0, *, batch: float = 4.0, read_s: float = 0.0) -> EngineTerms:
    """Engines whose rollouts make ten tokens a second at any load."""
    return EngineTerms(remote=remote, local=local, batch=batch, rate=lambda _: 10.0, read_s=read_s)


def rollouts(*rests: float, context: float = 0.0) -> list[ForecastRollout]:
    return [ForecastRollout(rest, group, context, running=False) for group, rest in enumerate(rests)]


def test_what_fits_at_once_ends_after_its_own_length() -> None:
    done = forecast_groups(rollouts(100.0, 300.0), terms(1.0), cut_s=0.0)
    assert [one.group for one in done] == [0, 1]
    assert [one.end_s for one in done] == pytest.approx([10.0, 30.0])


def test_what_does_not_fit_begins_when_something_ends() -> None:
    done = forecast_groups(rollouts(*[100.0] * 8), terms(1.0), cut_s=0.0)
    assert [one.end_s for one in done] == pytest.approx([10.0] * 4 + [20.0] * 4)


def test_a_group_is_complete_with_its_last_sample() -> None:
    both = [ForecastRollout(rest, 0, 0.0, running=True) for rest in (100.0, 300.0)]
    assert [(one.group, one.end_s) for one in forecast_groups(both, terms(1.0), cut_s=0.0)] == [(0, 30.0)]


def test_engines_that_end_at_the_cut_leave_their_rollouts_to_the_others() -> None:
    with_them = forecast_groups(rollouts(*[100.0] * 8), terms(1.0, 1.0), cut_s=inf)
    until_5s = forecast_groups(rollouts(*[100.0] * 8), terms(1.0, 1.0), cut_s=5.0)
    assert with_them[-1].end_s == pytest.approx(10.0)
    assert until_5s[-1].end_s == pytest.approx(15.0)  # half of them have half of their tokens to make


def test_what_is_moved_at_the_cut_is_read_again() -> None:
    moved = rollouts(*[100.0] * 8, context=150.0)
    free = forecast_groups(moved, terms(1.0, 1.0), cut_s=5.0)
    read = forecast_groups(moved, terms(1.0, 1.0, read_s=0.01), cut_s=5.0)
    assert read[-1].end_s - free[-1].end_s == pytest.approx(4 * (150.0 + 50.0) * 0.01)


def test_without_engines_nothing_ends() -> None:
    assert forecast_groups(rollouts(100.0), terms(0.0), cut_s=0.0)[0].end_s == inf
    done = forecast_groups(rollouts(100.0, 20.0), terms(0.0, 1.0), cut_s=5.0)
    assert [one.end_s for one in done] == [pytest.approx(2.0), inf]


def test_a_rollout_that_stands_for_several_takes_their_room() -> None:
    alone = forecast_groups(rollouts(*[100.0] * 4), terms(1.0), cut_s=0.0)
    each_two = forecast_groups(rollouts(*[100.0] * 4), terms(1.0), cut_s=0.0, weight=2.0)
    assert alone[-1].end_s == pytest.approx(10.0)
    assert each_two[-1].end_s == pytest.approx(20.0)


def test_engines_are_faster_in_the_tail() -> None:
    slowing = EngineTerms(remote=1.0, local=0.0, batch=4.0, rate=lambda load: 40.0 / load)
    done = forecast_groups(rollouts(100.0, 100.0, 100.0, 300.0), slowing, cut_s=0.0)
    assert done[-1].end_s == pytest.approx(10.0 + 200.0 / 40.0)
