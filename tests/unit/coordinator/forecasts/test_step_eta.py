"""A run knows when its open rollouts end, and which of them may be the last."""

from random import Random

import pytest

from ebbtide.coordinator.forecasts.length_learner import LengthQuantiles
from ebbtide.coordinator.forecasts.run_forecasts import RunForecasts
from ebbtide.coordinator.forecasts.step_eta import StepEta, WaitingWork, step_end
from tests.unit.coordinator.forecasts.drawn_lengths import drawn
from tests.unit.coordinator.forecasts.live_groups import begin, play, submit


def quantiles(tokens: float) -> LengthQuantiles:
    return LengthQuantiles(tokens, 0.8 * tokens, tokens, 1.1 * tokens, 1.2 * tokens)


def test_a_step_ends_with_its_longest_rollout() -> None:
    end = step_end([quantiles(100.0), quantiles(100.0), quantiles(1_000.0)], WaitingWork(), 3)
    assert end.half == pytest.approx(1_000.0, rel=0.05)
    assert end.half < end.ninth < 1_400.0
    assert end.tail == 1.0


def test_what_waits_puts_the_end_off_and_shortens_the_tail() -> None:
    alone = step_end([quantiles(500.0)] * 4, WaitingWork(), 4)
    behind = step_end([quantiles(500.0)] * 4, WaitingWork(8_000.0, quantiles(500.0)), 4)
    assert behind.half > alone.half + 1_500.0
    assert behind.tail < 0.3


def test_nothing_open_ends_at_once() -> None:
    assert step_end([], WaitingWork(), 0) == (0.0, 0.0, 0.0)


def test_a_run_names_its_latest_rollouts() -> None:
    forecasts = RunForecasts(64)
    for step in range(3):
        play(forecasts, 1_000 * step, drawn(Random(step), 64, alike=0.9), step + 1.0)
    for place in range(9_000, 9_200):
        submit(forecasts, place, 2)
        samples = begin(forecasts, place, [0, 1])
        if place == 9_077:
            samples[0].made = 9_000
    for second in range(10, 60):
        forecasts.renew(float(second))
    eta = StepEta(forecasts)
    eta.look(1.0)
    assert eta.count == 0  # there are too many groups for one call
    for _ in range(3):
        eta.look(1.0)
    assert eta.count == 1
    last = eta.latest[0][0]
    assert last.startswith("s9077.")
    eta.look(1.5)
    assert eta.count == 1
