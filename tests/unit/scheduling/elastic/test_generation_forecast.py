"""When the groups of a step are foreseen to be complete."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.generation_forecast import EngineTerms, ForecastRollout, GenerationForecast


class Completed(NamedTuple):
    end_s: float
    group: int


def terms(remote: float, local: float = 0.0, *, held: float = 0.0, read_s: float = 0.0) -> EngineTerms:
    """Engines of four rollouts that make ten tokens a second at any load."""
    pace = EnginePace(step_s=0.1, rollout_s=0.0)
    return EngineTerms(remote=remote, local=local, held=held, batch=4.0, pace=pace, read_s=read_s)


def forecast_groups(
    rollouts: Sequence[ForecastRollout], terms: EngineTerms, *, cut_s: float, weight: float = 1.0
) -> list[Completed]:
    done = GenerationForecast(rollouts, terms, weight=weight).groups(cut_s)
    return [Completed(*one) for one in zip(done.end_s.tolist(), done.group.tolist(), strict=True)]


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
    slowing = replace(terms(1.0), pace=EnginePace(step_s=0.0, rollout_s=1.0 / 40.0))
    done = forecast_groups(rollouts(100.0, 100.0, 100.0, 300.0), slowing, cut_s=0.0)
    assert done[-1].end_s == pytest.approx(10.0 + 200.0 / 40.0)


def test_rollouts_slow_down_as_their_contexts_grow() -> None:
    slowing = replace(terms(1.0), pace=EnginePace(step_s=0.1, rollout_s=0.0, context_s=1e-4))
    done = forecast_groups(rollouts(100.0, context=500.0), slowing, cut_s=0.0)
    assert done[-1].end_s == pytest.approx(10.0 * 1.55)  # by the mean of 500 and 600 tokens


def test_devices_that_return_at_once_leave_their_share_to_the_others_too() -> None:
    running = [ForecastRollout(100.0, group, 150.0, running=True) for group in range(4)]
    elsewhere = forecast_groups(running, terms(1.0, 1.0, read_s=0.01), cut_s=0.0)
    on_them = forecast_groups(running, terms(1.0, 1.0, held=1.0, read_s=0.01), cut_s=0.0)
    assert on_them[-1].end_s - elsewhere[-1].end_s == pytest.approx(2 * 150.0 * 0.01)


def test_groups_without_a_rollout_on_the_returned_devices_are_complete_first() -> None:
    lent = [ForecastRollout(100.0, group, 0.0, running=True, lent=group % 2 == 1) for group in range(8)]
    done = forecast_groups(lent, terms(1.0, 1.0, held=1.0), cut_s=5.0)
    assert sorted(one.group for one in done[:4]) == [0, 2, 4, 6]
    assert [one.end_s for one in done] == pytest.approx([10.0] * 4 + [15.0] * 4)


def test_where_nobody_knows_what_runs_on_the_devices_it_is_whole_groups() -> None:
    running = [ForecastRollout(100.0, at // 2, 0.0, running=True) for at in range(8)]
    done = forecast_groups(running, terms(1.0, 1.0, held=1.0), cut_s=5.0)
    assert [one.group for one in done] == [2, 3, 0, 1]


@pytest.mark.parametrize("cut_s", [0.0, 3.0, 7.0, 16.0, 40.0])
def test_forecasts_of_one_step_do_not_depend_on_those_before(cut_s: float) -> None:
    mixed = [ForecastRollout(40.0 + 13.0 * at, at // 2, 50.0, running=at < 6) for at in range(24)]
    shared = GenerationForecast(mixed, terms(1.0, 1.0, held=1.0, read_s=0.002))
    for other_s in (inf, 5.0, 0.0, 20.0):
        shared.groups(other_s)
    alone = GenerationForecast(mixed, terms(1.0, 1.0, held=1.0, read_s=0.002)).groups(cut_s)
    assert shared.groups(cut_s).end_s.tolist() == alone.end_s.tolist()
    assert shared.groups(cut_s).group.tolist() == alone.group.tolist()
