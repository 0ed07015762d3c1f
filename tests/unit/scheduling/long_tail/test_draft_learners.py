"""What is learnt of drafts: how far they are accepted, what they cost, and whether they pay."""

from random import Random

import pytest

from ebbtide.scheduling.long_tail.drafts.draft_acceptance import DraftAcceptance
from ebbtide.scheduling.long_tail.drafts.speculation_switch import SpeculationMode, SpeculationSwitch
from ebbtide.scheduling.long_tail.drafts.verification_cost import VerificationCost


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_survival_is_learnt_although_drafts_differ_in_length(share: float) -> None:
    draw, learner = Random(1), DraftAcceptance()
    for _ in range(4_000):
        drafted, accepted = draw.randint(1, 6), 0
        while accepted < drafted and draw.random() < share:
            accepted += 1
        learner.observe(drafted, accepted)
    for length, survival in enumerate(learner.survival(6), 1):
        assert survival == pytest.approx(share**length, abs=0.04)


def test_survival_never_rises() -> None:
    draw, learner = Random(2), DraftAcceptance()
    for _ in range(50):
        learner.observe(draw.randint(0, 9), draw.randint(0, 9))
    survival = learner.survival(9)
    assert survival == sorted(survival, reverse=True)
    assert all(0.0 < one < 1.0 for one in survival)


def test_a_group_of_which_little_is_known_is_taken_to_be_like_the_others() -> None:
    every = DraftAcceptance()
    for _ in range(500):
        every.observe(4, 4)
    group = DraftAcceptance(every)
    assert group.survival(4)[3] > 0.8
    for _ in range(200):
        group.observe(4, 0)
    assert group.survival(4)[0] < 0.1


def test_costs_are_learnt_with_their_knee() -> None:
    draw, cost = Random(3), VerificationCost()
    for _ in range(3_000):
        tokens = draw.randint(1, 1_024)
        cost.observe(tokens, draw.uniform(0.9, 1.1) * max(0.02, 0.0001 * tokens))
    assert cost.known
    assert cost.seconds(64) == pytest.approx(0.02, rel=0.08)
    assert cost.seconds(800) == pytest.approx(0.08, rel=0.1)
    assert cost.seconds(4_096) == pytest.approx(0.4, rel=0.1)


def test_costs_never_fall_with_the_number_of_tokens() -> None:
    draw, cost = Random(4), VerificationCost()
    for _ in range(60):
        cost.observe(draw.randint(1, 500), draw.uniform(0.01, 0.05))
    found = [cost.seconds(tokens) for tokens in range(1, 700)]
    assert found == sorted(found)


def test_steps_that_took_no_time_or_none_at_all_teach_nothing() -> None:
    cost = VerificationCost()
    for tokens, seconds in ((0, 1.0), (5, 0.0), (5, float("nan")), (5, float("inf")), (9, -1.0)):
        cost.observe(tokens, seconds)
    assert not cost.known


def test_speculation_that_does_not_pay_is_switched_off_and_seldom_tried() -> None:
    switch = SpeculationSwitch()
    modes = [switch.step(1.0) for _ in range(10_000)]
    assert modes.index(SpeculationMode.OFF) < 20
    assert SpeculationMode.ON not in modes[20:]
    assert 2 <= modes.count(SpeculationMode.TRY) <= 20


def test_it_is_switched_on_again_once_it_pays() -> None:
    switch = SpeculationSwitch()
    for _ in range(100):
        switch.step(0.9)
    assert switch.step(1.01) is not SpeculationMode.ON  # no more than an error of the forecast
    assert switch.step(1.2) is SpeculationMode.ON


def test_it_is_switched_off_by_gains_that_forecasts_make_up() -> None:
    switch, draw = SpeculationSwitch(), Random(1)
    modes = [switch.step(1.0 + 0.015 * draw.random()) for _ in range(100)]
    assert SpeculationMode.ON not in modes[20:]


def test_a_single_step_without_a_gain_does_not_switch_it_off() -> None:
    switch = SpeculationSwitch()
    assert all(switch.step(gain) is SpeculationMode.ON for gain in [1.3, 1.0, 1.2, 1.0] * 50)
