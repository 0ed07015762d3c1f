"""How RLBoost's window follows the idle times of trainer and engines."""

from typing import cast

import pytest

from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from benchmarks.rivals.rlboost.seeding_window import SeedingWindow
from ebbtide.simulator.outcome import StepOutcome


class Instances:
    """Remote engines, as many on average over a step as at its end, unless told."""

    def __init__(self, count: int) -> None:
        self.count, self.mean, self.most = count, float(count), None

    def remote(self) -> int:
        return self.count

    def take_mean_remote(self, now: float) -> float:
        del now
        return self.mean


def step(*, generated_s: float, trained_s: float) -> StepOutcome:
    return StepOutcome(
        run="r", step=0, opened_s=0.0, generated_s=generated_s, trained_s=trained_s, rollouts=1, tokens=1, tail_s=0.0
    )


def window(instances: Instances, *, remembers: bool = True, initial_s: float = 100.0) -> SeedingWindow:
    deciding = cast("PendingBalance", instances)
    return SeedingWindow(deciding, 4, eta=3.0, initial_s=initial_s, memory={} if remembers else None)


def test_an_idle_trainer_lengthens_the_window_by_a_share_of_its_idle_time() -> None:
    around = window(Instances(2))
    around.trained(step(generated_s=400.0, trained_s=400.0), 210.0)  # 90 s idle behind the window
    assert around.open_s() == pytest.approx(100.0 + 90.0 / 3.0)


def test_idle_engines_shorten_the_window_which_keeps_a_least_length() -> None:
    around = window(Instances(2))
    around.trained(step(generated_s=250.0, trained_s=340.0), 240.0)
    assert around.open_s() == pytest.approx(100.0 - 90.0 / 3.0)
    around.trained(step(generated_s=100.0, trained_s=1000.0), 930.0)
    assert around.open_s() == 5.0


def test_the_window_of_a_number_of_instances_is_used_again_with_it() -> None:
    instances = Instances(2)
    around = window(instances)
    around.trained(step(generated_s=400.0, trained_s=400.0), 210.0)
    with_two = around.open_s()
    instances.count, instances.mean = 4, 3.0  # two came during the step
    around.trained(step(generated_s=250.0, trained_s=340.0), 200.0)
    instances.mean = 4.0
    around.trained(step(generated_s=250.0, trained_s=340.0), 200.0)
    with_four = around.open_s()
    instances.count, instances.mean = 2, 3.0
    around.trained(step(generated_s=250.0, trained_s=340.0), 200.0)
    assert around.open_s() == with_two != with_four


def test_without_memory_the_window_only_follows_the_last_step() -> None:
    instances = Instances(2)
    around = window(instances, remembers=False)
    around.trained(step(generated_s=400.0, trained_s=400.0), 210.0)
    instances.mean = 3.0
    around.trained(step(generated_s=400.0, trained_s=400.0), 180.0)
    assert around.open_s() == pytest.approx(130.0 + 90.0 / 3.0)


def test_no_more_instances_are_used_than_end_the_rollouts_within_the_training() -> None:
    instances = Instances(6)
    around = window(instances, initial_s=10.0)
    assert around.helpful == 4
    around.trained(step(generated_s=200.0, trained_s=410.0), 400.0)  # (200 x 6 + 5 x 4) / 400 = 3.05
    assert around.helpful == 4
    around.trained(step(generated_s=380.0, trained_s=410.0), 400.0)  # (380 x 6 + 5 x 4) / 400 = 5.75
    assert around.helpful == 6
