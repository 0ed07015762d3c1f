"""Steps end sooner where the order of starts follows forecasts of lengths, by the coordinator's own queue."""

import msgspec
import pytest

from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.training_run import TrainingRun
from tests.unit.simulator.test_world import pool, simulated, training


def generated_s(order: str, correlation: float) -> float:
    """Seconds of generation of all steps but the first, which teaches lengths."""
    lengths = LengthSpec(median=40, sigma=1.3, most=1600, correlation=correlation)
    run = training(prompts=12, group=8, steps=5, cap=1600, lengths=lengths, order=order)
    outcomes = [simulated(seed=seed, hours=8.0, fleet=(pool(1),), run=(run,)) for seed in range(2)]
    return sum(step.generated_s - step.opened_s for one in outcomes for step in one.steps[1:])


def test_steps_with_long_groups_end_sooner_in_the_order_of_lengths() -> None:
    assert generated_s("lengths", 0.5) < 0.93 * generated_s("submitted", 0.5)


def test_where_samples_have_nothing_in_common_the_order_costs_nothing() -> None:
    assert generated_s("lengths", 0.0) == pytest.approx(generated_s("submitted", 0.0), rel=0.05)


def test_keys_of_a_runs_tail_that_the_simulator_does_not_play_are_refused() -> None:
    run = {"name": "a", "trainer": "t", "tail": {"rounds": "whole_groups"}}
    with pytest.raises(msgspec.ValidationError, match="unknown field `tail`"):
        msgspec.convert(run, TrainingRun)
