"""What a trainer decides in a step, by what its coordinator tells it."""

from math import exp, inf, sqrt
from random import Random
from time import thread_time
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.trainer.lending.step_window import AGAIN_S, SOONEST_S, StepWindow, TrainedStep, TrainerStep
from ebbtide.types.remaining_work import EnginePace, OpenGroup, RemainingWork

_LOCAL = ("local0", "local1")
CAP = 14_336
#: An engine's step takes 12 ms and 0.2 ms for each rollout, whatever its context.
PLAIN = EnginePace(step_s=0.012, rollout_s=0.0002)


def drawn_groups(draw: Random, groups: int = 128, *, size: int = 8, correlation: float = 0.9) -> list[list[int]]:
    """Lengths of groups whose samples are alike."""
    found = []
    for _ in range(groups):
        shared = draw.gauss()
        parts = [sqrt(correlation) * shared + sqrt(1 - correlation) * draw.gauss() for _ in range(size)]
        found.append([min(CAP, max(1, round(4_000 * exp(0.6 * part)))) for part in parts])
    return found


def told(made: int, *, elsewhere: int = 2, local: int = 2, groups: int = 128, **more: Any) -> RemainingWork:
    """A step of which each running response has so many tokens."""
    names = (*(f"w{at}" for at in range(elsewhere)), *_LOCAL[:local])
    drawn = [lengths for lengths in drawn_groups(Random(1))[:groups] if max(lengths) > made]
    open_ = [
        OpenGroup(
            prompt=256,
            running=tuple(made for one in lengths if one > made),
        )
        for lengths in drawn
    ]
    fields: dict[str, Any] = {
        "fleet": "f",
        "groups": tuple(open_),
        "open": len(open_),
        "newest": 3,
        "engines": names,
        "speeds": (1.0,) * len(names),
        "versions": (3,) * len(names),
        "rollouts": (8,) * len(names),
        "lent": (True,) * len(names),
        "spot": tuple(name.startswith("w") for name in names),
        "shares": (1.0,) * len(names),
        "step_s": PLAIN.step_s,
        "rollout_s": PLAIN.rollout_s,
    }
    return RemainingWork(**(fields | more))


def step(left: RemainingWork, **more: Any) -> TrainerStep:
    """128 groups, of which those that are not open are there."""
    missing = left.open + left.ended
    fields: dict[str, Any] = {"missing": missing, "complete": 128 - missing, "local": _LOCAL}
    return TrainerStep(**(fields | more))


@pytest.fixture
def taught() -> StepWindow:
    window = StepWindow()
    window.trained(trained(drawn_groups(Random(0)), 400.0))
    return window


def trained(groups: list[list[int]], learning_s: float) -> TrainedStep:
    tokens = sum(sum(lengths) + 256 * len(lengths) for lengths in groups)
    return TrainedStep(responses=groups, tokens=tokens, learning_s=learning_s)


def window_s(window: StepWindow, left: RemainingWork, **more: Any) -> float:
    window.look_s(left, step(left, **more))
    assert window.plan is not None
    return window.plan.window_s


def test_a_window_is_looked_at_again_before_it_is_over_and_ends_once_its_plan_says_so(taught: StepWindow) -> None:
    early, late = told(1_000), told(12_000)
    look_s = taught.look_s(early, step(early))
    assert taught.plan is not None
    assert SOONEST_S <= look_s < taught.plan.window_s < inf
    assert taught.look_s(late, step(late, ready_tokens=4_000_000)) == 0.0


def test_both_sides_end_together_by_the_closed_form(taught: StepWindow) -> None:
    left = told(0)
    taught.look_s(left, step(left, complete=20))
    plan = taught.plan
    assert plan is not None
    assert plan.window_s > 0.0
    # Two of four like engines are elsewhere: generation goes on half as fast behind the window.
    behind_s = 2.0 * (plan.generated_s - plan.window_s)
    assert behind_s == pytest.approx(400.0, rel=0.01)
    assert plan.end_s == pytest.approx(plan.window_s + 400.0, rel=0.01)


def test_devices_that_would_find_nothing_to_train_on_stay_lent(taught: StepWindow) -> None:
    left = told(0, elsewhere=40)
    assert taught.look_s(left, step(left, complete=20)) == 0.0
    assert taught.look_s(left, step(left)) > SOONEST_S, "the first groups take longer than that"
    later = told(6_000, elsewhere=40)
    assert taught.look_s(later, step(later, complete=5)) == SOONEST_S, "they are late"


def test_what_is_left_of_a_response_is_what_longer_ones_of_the_last_step_still_had() -> None:
    window = StepWindow()
    window.trained(trained([[10, 20], [30, 60]], 1.0))
    assert window._rest(0) == 30.0
    assert window._rest(20) == 25.0
    assert window._rest(30) == 30.0
    assert window._rest(60) == 30.0, "longer than all: half of the longest"


def test_without_engines_elsewhere_the_devices_stay_lent(taught: StepWindow) -> None:
    assert window_s(taught, told(1_000, elsewhere=0)) == inf


def test_an_engine_that_is_lost_in_mid_step_makes_the_window_longer(taught: StepWindow) -> None:
    assert window_s(taught, told(1_000, elsewhere=1)) > window_s(taught, told(1_000, elsewhere=3))


def test_faster_engines_elsewhere_make_it_shorter_and_those_that_are_seldom_lent_do_not(taught: StepWindow) -> None:
    plain = window_s(taught, told(1_000))
    assert window_s(taught, told(1_000, speeds=(2.0, 2.0, 1.0, 1.0))) < plain
    assert window_s(taught, told(1_000, speeds=(2.0, 2.0, 1.0, 1.0), shares=(0.5, 0.5, 1.0, 1.0))) == pytest.approx(
        plain
    )


def test_engines_with_another_version_do_not_count_unless_any_version_will_do(taught: StepWindow) -> None:
    stale = told(1_000, versions=(2, 2, 3, 3))
    assert window_s(taught, stale) == inf
    assert window_s(taught, stale, any_version=True) == window_s(taught, told(1_000))


def test_a_sample_of_the_groups_stands_for_all(taught: StepWindow) -> None:
    whole = told(1_000)
    half = replace(whole, groups=whole.groups[::2])
    assert window_s(taught, half) == pytest.approx(window_s(taught, whole), rel=0.15)


def test_groups_that_are_not_submitted_yet_are_expected_to_be_like_the_last_ones(taught: StepWindow) -> None:
    empty = replace(told(0, groups=0), groups=(), open=0)
    queued = replace(empty, groups=(OpenGroup(prompt=256, waiting=(0,) * 8),) * 96, open=128)
    assert window_s(taught, empty, missing=128, complete=0) == pytest.approx(window_s(taught, queued), rel=0.05)
    assert taught.lends(empty, step(empty, missing=128, complete=0))


def test_a_step_that_others_generate_in_a_moment_is_not_lent_for() -> None:
    window, empty = StepWindow(), replace(told(0, groups=0), groups=(), open=0)
    assert window.lends(empty, step(empty, missing=128, complete=0)), "nothing was learnt yet"
    groups = [[30] * 8 for _ in range(16)]
    window.trained(trained(groups, 10.0))
    fast = replace(empty, speeds=(50.0, 50.0, 1.0, 1.0))
    assert not window.lends(fast, step(fast, missing=16, complete=0))


def test_a_window_that_nothing_was_learnt_for_ends_with_some_of_the_groups() -> None:
    window, early, late = StepWindow(), told(0), told(6_000, speeds=(4.0, 4.0, 1.0, 1.0))
    assert window.look_s(early, step(early)) > 0.0
    assert late.open < 100
    assert window.look_s(late, step(late)) == 0.0


def test_devices_without_an_engine_are_not_left_idle(taught: StepWindow) -> None:
    gone = told(2_000, local=0)
    assert taught.look_s(gone, step(gone, local=())) == 0.0
    nobody = told(2_000, elsewhere=0, local=0)
    assert taught.look_s(nobody, step(nobody, local=())) > 0.0


def test_devices_are_lent_again_once_an_engine_elsewhere_was_lost_and_not_sooner(taught: StepWindow) -> None:
    before, after = told(2_000, elsewhere=4), told(2_000, elsewhere=1)
    taught.closed(before, step(before))
    assert not taught.lends_again(10.0, before, step(before))
    assert not taught.lends_again(10.0 + 0.5 * AGAIN_S, after, step(after)), "it was asked a moment ago"
    assert taught.lends_again(10.0 + AGAIN_S, after, step(after))
    assert not taught.lends_again(20.0 + AGAIN_S, after, step(after)), "nothing else was lost"


def test_devices_are_lent_again_once_the_hosts_of_all_others_need_their_devices_for_long() -> None:
    window, before = StepWindow(), told(2_000, elsewhere=2)
    window.closed(before, step(before))
    busy: dict[str, Any] = {"lent": (False, False, True, True)}
    brief = told(2_000, elsewhere=2, shares=(0.4, 0.4, 1.0, 1.0), **busy)
    assert not window.lends_again(10.0, brief, step(brief)), "they lend again soon"
    long = told(2_000, elsewhere=2, shares=(0.0, 0.0, 1.0, 1.0), **busy)
    assert window.lends_again(20.0, long, step(long))


def test_devices_are_lent_again_once_nobody_else_is_left_even_if_nothing_was_learnt() -> None:
    window, alone = StepWindow(), told(2_000, elsewhere=0)
    assert window.lends_again(10.0, alone, step(alone))
    assert not window.lends_again(20.0, alone, step(alone, local=()))


def test_one_spot_engine_too_many_is_named_and_never_the_last_one(taught: StepWindow) -> None:
    many = told(0, elsewhere=60, rollouts=(*range(5, 65), 8, 8))
    assert taught.surplus(many, step(many)) == "w0"
    few = told(0)
    assert taught.surplus(few, step(few)) == ""
    one = told(14_000, elsewhere=1)
    assert taught.surplus(one, step(one)) == ""


def test_no_spot_engine_is_too_many_while_none_elsewhere_has_the_version(taught: StepWindow) -> None:
    new = told(0, local=0, versions=(0, 0))
    assert taught.surplus(new, step(new, missing=new.open, complete=0)) == ""


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        told(0, speeds=(1.0,))


def test_a_decision_among_a_thousand_engines_takes_some_milliseconds(taught: StepWindow) -> None:
    many = replace(told(2_000, elsewhere=1_000), open=8_000)
    asked, times = step(many, missing=8_000, complete=0), list[float]()
    for _ in range(5):
        began = thread_time()
        taught.look_s(many, asked)
        times.append(thread_time() - began)
    assert sorted(times)[2] < 0.03, "others use the machine, too"
