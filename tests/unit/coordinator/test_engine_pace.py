"""What a step takes, fitted to what was seen of engines."""

from random import Random

import pytest

from ebbtide.coordinator.forecasts.engine_pace import ThroughputPoint, fitted_pace, relative_speed
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.types.remaining_work import EnginePace

_TRUE = EnginePace(step_s=0.01, rollout_s=8e-5, context_s=3e-8)


def seen(*, noise: float = 0.0) -> list[ThroughputPoint]:
    """A step of generation: contexts grow while the load falls."""
    draw, points = Random(0), list[ThroughputPoint]()
    for load, context in ((170, 1_500), (150, 3_000), (90, 5_000), (40, 8_000), (12, 11_000), (3, 13_000), (1, 14_000)):
        token_s = _TRUE.seconds(load, context) * (1.0 + noise * draw.uniform(-1, 1))
        points.append(ThroughputPoint(load, token_s, context, 5.0))
    return points


@pytest.mark.parametrize(("load", "context"), [(1, 2_000), (8, 4_000), (32, 2_000), (64, 12_000), (170, 6_000)])
def test_a_pace_holds_at_contexts_that_were_never_seen_with_such_a_load(load: float, context: float) -> None:
    exact, noisy = fitted_pace(seen()), fitted_pace(seen(noise=0.05))
    assert exact.seconds(load, context) == pytest.approx(_TRUE.seconds(load, context), rel=0.01)
    assert noisy.seconds(load, context) == pytest.approx(_TRUE.seconds(load, context), rel=0.25)


def test_no_part_of_a_step_is_negative() -> None:
    falling = [ThroughputPoint(load, 0.02 - 1e-4 * load, 5_000.0, 5.0) for load in (1, 20, 60, 100)]
    pace = fitted_pace(falling)
    assert min(pace.step_s, pace.rollout_s, pace.context_s) >= 0.0
    assert pace.seconds(40, 5_000.0) == pytest.approx(0.016, rel=0.5)


def test_a_single_observation_is_believed() -> None:
    assert fitted_pace([ThroughputPoint(64.0, 0.03, 2_000.0, 1.0)]).seconds(64, 2_000.0) == pytest.approx(
        0.03, rel=0.01
    )


def test_of_engines_that_were_never_seen_something_is_assumed() -> None:
    assert fitted_pace([]) == EnginePace()


def test_a_worker_tells_what_was_seen_of_it() -> None:
    throughput = WorkerThroughput()
    throughput.observe(10, 500.0, 1_000, 2.0)
    assert throughput.points() == [ThroughputPoint(10.0, 0.02, 500.0, 2.0)]


def test_an_engine_that_takes_a_third_of_the_time_is_three_times_as_fast_at_whatever_loads_it_was_seen() -> None:
    fast = [point._replace(token_s=point.token_s / 3.0) for point in seen()[2:5]]
    assert relative_speed(fast, _TRUE) == pytest.approx(3.0)
    assert relative_speed(seen(), _TRUE) == pytest.approx(1.0)
    assert relative_speed([], _TRUE) == 1.0
