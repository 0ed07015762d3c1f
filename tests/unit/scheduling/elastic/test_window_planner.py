"""When a trainer's devices return from generation."""

from dataclasses import dataclass
from math import inf
from random import Random
from statistics import median
from time import thread_time

import pytest
from msgspec.structs import replace

from ebbtide.scheduling.elastic.loan_view import LendableDevice
from ebbtide.scheduling.elastic.window_planner import WindowPlanner, closed_form_s
from tests.unit.scheduling.elastic.step_left import drawn_groups, left_of, view

_TOKEN_S = 75e-6


@pytest.fixture
def planner() -> WindowPlanner:
    """One that has seen a step."""
    taught = WindowPlanner()
    taught.lengths.step_ended(drawn_groups(Random(0)))
    taught.trained(5_000_000, 5_000_000 * _TOKEN_S)
    return taught


@dataclass
class Fluid:
    """Work without a tail, in seconds of one engine."""

    work_s: float
    training_s: float
    local: float

    def ends(self, window_s: float, remote: float) -> tuple[float, float]:
        """When training and generation end."""
        rest = self.work_s - window_s * (remote + self.local)
        return window_s + self.training_s, window_s + rest / remote


@pytest.mark.parametrize("remote", [1.0, 2.5, 4.0])
def test_behind_the_closed_window_training_and_generation_end_together(remote: float) -> None:
    step = Fluid(work_s=2_126.0, training_s=401.0, local=4.0)
    window_s = closed_form_s(step.work_s, step.training_s, remote, step.local)
    trained_s, generated_s = step.ends(window_s, remote)
    assert trained_s == pytest.approx(generated_s)


def test_the_closed_window_is_the_published_table_of_a_14b_model() -> None:
    """Windows that RLBoost's authors tuned by hand for one to four instances."""
    windows = [closed_form_s(2_126.0, 401.0, n, 4.0) for n in (1, 2, 3, 4)]
    assert windows == pytest.approx([346, 212, 145, 60], rel=0.1)


def test_enough_engines_elsewhere_need_no_window() -> None:
    assert closed_form_s(2_126.0, 401.0, 6.0, 4.0) == 0.0


def test_without_engines_elsewhere_the_devices_generate_until_the_end(planner: WindowPlanner) -> None:
    assert closed_form_s(2_126.0, 401.0, 0.0, 4.0) == inf
    assert planner.plan(view(left_of(drawn_groups(Random(1)), 2_000), remote=0.0)).window_s == inf


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_more_engines_elsewhere_the_sooner_the_devices_return(planner: WindowPlanner, seed: int) -> None:
    left = left_of(drawn_groups(Random(seed)), 500)
    windows = [planner.plan(view(left, remote=remote)).window_s for remote in (1.0, 2.0, 4.0, 12.0)]
    assert windows[0] > windows[1] > windows[3]
    assert windows[2] >= windows[3]


def test_a_fleet_that_shrinks_in_mid_step_lengthens_the_window_at_once(planner: WindowPlanner) -> None:
    left = left_of(drawn_groups(Random(4)), 1_000)
    before, after = (planner.plan(view(left, remote=remote)) for remote in (4.0, 1.0))
    assert after.window_s > before.window_s + 30.0


def test_a_step_with_little_left_gives_the_devices_back_now(planner: WindowPlanner) -> None:
    groups = drawn_groups(Random(5))
    left = left_of(groups, 8_000)
    ready = sum(sum(lengths) for lengths in groups if max(lengths) <= 8_000)
    plan = planner.plan(view(left, remote=4.0, ready=ready, complete=128 - len(left)))
    assert plan.window_s == 0.0
    assert "now" in plan.why


def test_a_device_is_told_to_end_before_the_others_by_what_its_switch_takes_longer(planner: WindowPlanner) -> None:
    shown = view(left_of(drawn_groups(Random(6)), 500), remote=1.0)
    slow, quick = LendableDevice(name="slow", off_s=6.0), LendableDevice(name="quick", off_s=1.0)
    plan = planner.plan(replace(shown, devices=[slow, quick]))
    assert plan.return_s["quick"] - plan.return_s["slow"] == pytest.approx(5.0)


def test_a_device_without_rollouts_returns_at_once(planner: WindowPlanner) -> None:
    shown = view(left_of(drawn_groups(Random(6)), 500), remote=1.0)
    idle = LendableDevice(name="idle", busy=False)
    plan = planner.plan(replace(shown, devices=[*shown.devices, idle]))
    assert plan.return_s["idle"] == 0.0
    assert plan.return_s["0"] > 0.0


def test_what_moves_at_the_cut_costs_time(planner: WindowPlanner) -> None:
    shown = view(left_of(drawn_groups(Random(7)), 3_000), remote=2.0)
    cheap, dear = (planner.plan(replace(shown, read_s=read_s)) for read_s in (0.0, 1.0 / 2_000.0))
    assert dear.end_s > cheap.end_s


def test_generation_that_goes_on_for_longer_than_forecast_lengthens_the_next_windows(planner: WindowPlanner) -> None:
    shown = view(left_of(drawn_groups(Random(8)), 1_500), remote=1.0)
    before = planner.plan(shown)
    for _ in range(6):
        planner.generated(100.0, 160.0)
    after = planner.plan(shown)
    assert after.end_s > before.end_s
    assert after.window_s >= before.window_s


def test_devices_that_were_returned_are_lent_again_once_most_engines_are_lost(planner: WindowPlanner) -> None:
    left = left_of(drawn_groups(Random(9)), 1_000)
    assert planner.lends_again(view(left, remote=0.5))
    assert not planner.lends_again(view(left, remote=12.0))


def test_a_switch_that_costs_more_than_it_brings_is_not_made(planner: WindowPlanner) -> None:
    left = left_of(drawn_groups(Random(9)), 1_000)
    assert not planner.lends_again(view(left, remote=0.5, on_s=5_000.0, off_s=5_000.0))


def test_one_engine_too_many_is_released_and_one_that_helps_is_not(planner: WindowPlanner) -> None:
    left = left_of(drawn_groups(Random(10)), 0)
    assert planner.surplus(view(left, remote=40.0), 1.0)
    assert not planner.surplus(view(left, remote=2.0), 1.0)


def test_the_last_engine_elsewhere_is_never_released(planner: WindowPlanner) -> None:
    assert not planner.surplus(view(left_of(drawn_groups(Random(10)), 8_000), remote=1.0), 1.0)


def test_before_anything_is_learnt_the_first_complete_groups_end_the_window() -> None:
    fresh, left = WindowPlanner(), left_of(drawn_groups(Random(11)), 2_000)
    assert fresh.plan(view(left, remote=2.0, complete=0)).window_s == inf
    assert fresh.plan(view(left, remote=2.0, complete=len(left))).window_s == 0.0


def test_before_anything_is_learnt_few_engines_elsewhere_keep_the_devices_for_longer() -> None:
    fresh, left = WindowPlanner(), left_of(drawn_groups(Random(11)), 2_000)
    half = len(left)  # of all groups
    assert fresh.plan(view(left, remote=1.0, complete=half)).window_s == inf
    assert fresh.plan(view(left, remote=3.0, complete=half)).window_s == 0.0


def test_a_plan_takes_less_than_ten_milliseconds_of_a_processor_however_many_groups_there_are(
    planner: WindowPlanner,
) -> None:
    shown = view(left_of(drawn_groups(Random(12), groups=8_000), 2_000), remote=996.0)
    took_s = []
    for _ in range(20):
        begin_s = thread_time()
        planner.plan(shown)
        took_s.append(thread_time() - begin_s)
    assert median(took_s) < 0.01
