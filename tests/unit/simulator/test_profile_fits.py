"""Fits find the costs that made the measurements, and say how far they are from them."""

from random import Random

import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.profiling.engine_measuring import MeasuredSteps, StepGroup
from ebbtide.profiling.measured_learning import LearnerWork
from ebbtide.profiling.profile_fits import fit_step_costs, fit_trainer_costs, least_squares
from ebbtide.simulator.engines.engine_profile import StepCosts

COSTS = StepCosts(base_s=0.02, token_s=1e-4, sequence_s=5e-5, context_s=1e-7, pair_s=1e-9)


def measured(costs: StepCosts, *, noise: float = 0.0, hiccups: float = 0.0) -> list[MeasuredSteps]:
    draw, found = Random(7), []
    for batch in (1, 4, 16, 64, 128, 256):
        for mean in (100, 2000):
            for prefill in (0, 64, 512, 2048):
                context, pairs = float(batch * mean), prefill * prefill // 2
                seconds = costs.step_s(batch=batch, context=batch * mean, prefill=prefill, pairs=pairs)
                seconds *= 1.0 + draw.uniform(-noise, noise)
                seconds *= 8.0 if draw.random() < hiccups else 1.0
                group = StepGroup(steps=1, batch=batch, context=context, prefill=prefill, pairs=pairs)
                found.append(MeasuredSteps(seconds=seconds, groups=(group,)))
    return found


def test_least_squares_never_go_below_zero_and_beat_every_other_choice() -> None:
    draw = np.random.default_rng(3)
    for _ in range(20):
        matrix, target = draw.normal(size=(12, 4)), draw.normal(size=12)
        found = least_squares(matrix, target)
        best = ((matrix @ found - target) ** 2).sum()
        assert (found >= 0).all()
        for _ in range(50):
            other = np.maximum(0.0, found + draw.normal(scale=0.1, size=4))
            assert ((matrix @ other - target) ** 2).sum() >= best - 1e-9


def test_a_fit_without_noise_predicts_steps_that_were_not_measured() -> None:
    fitted, errors = fit_step_costs(measured(COSTS))
    for batch, context, prefill in ((2, 500, 0), (32, 30_000, 300), (200, 10_000, 1000)):
        assert fitted.step_s(batch=batch, context=context, prefill=prefill) == pytest.approx(
            COSTS.step_s(batch=batch, context=context, prefill=prefill), rel=0.03
        )
    assert errors.worst < 1e-6


def test_steps_that_something_held_up_hardly_move_the_fit() -> None:
    fitted, errors = fit_step_costs(measured(COSTS, noise=0.03, hiccups=0.1))
    wanted = COSTS.step_s(batch=32, context=30_000, prefill=300)
    assert fitted.step_s(batch=32, context=30_000, prefill=300) == pytest.approx(wanted, rel=0.1)
    assert errors.median < 0.05
    assert errors.worst > 0.8


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="5 measured intervals are too few"):
        fit_step_costs(measured(COSTS)[:5])
    with pytest.raises(InvalidRequest, match="0 measured steps are too few"):
        fit_trainer_costs([])


def test_a_trainers_costs_are_found_with_the_part_of_a_further_forward() -> None:
    draw, found = Random(5), []
    for place in range(24):
        updates, micro, tokens, forwards = (
            draw.randint(1, 4),
            draw.randint(4, 30),
            draw.randint(1000, 50_000),
            place % 2,
        )
        pairs = float(tokens * draw.randint(50, 4000))
        gradients = 0.01 * micro + 2e-4 * tokens + 1e-8 * pairs
        seconds = 0.5 * updates + gradients * (1.0 + 0.25 * forwards)
        found.append(
            LearnerWork(
                seconds=seconds, updates=updates, micro_batches=micro, tokens=tokens, pairs=pairs, forwards=forwards
            )
        )
    costs, errors = fit_trainer_costs(found)
    assert [costs.update_s, costs.micro_batch_s] == pytest.approx([0.5, 0.01])
    assert [costs.token_s, costs.pair_s] == pytest.approx([2e-4, 1e-8])
    assert costs.forward_share == pytest.approx(0.25)
    assert errors.worst < 1e-6
