"""Drafts of an engine follow what was learnt of acceptance and cost, and end where they do not pay."""

from random import Random

import pytest

from ebbtide.scheduling.long_tail.drafts.draft_planner import DraftOffer, DraftPlanner
from ebbtide.scheduling.long_tail.drafts.speculation_switch import SpeculationMode

LONG, SHORT = DraftOffer("g", 20, 8), DraftOffer("g", 1, 8)


def played(planner: DraftPlanner, share: dict[int, float], *, token_s: float, steps: int = 400) -> list[list[int]]:
    """What a batch of two gets, if drafts behind matches are accepted token by token with these shares."""
    draw, given = Random(1), list[list[int]]()
    for _ in range(steps):
        lengths = planner.lengths([LONG, SHORT], 2) if planner.looks() else [0, 0]
        given.append(lengths)
        for offer, length in zip((LONG, SHORT), lengths, strict=True):
            accepted = 0
            while accepted < length and draw.random() < share[offer.match]:
                accepted += 1
            if length:
                planner.drafted(offer.group, offer.match, length, accepted)
        planner.stepped(2 + sum(lengths), 0.01 + token_s * (2 + sum(lengths)))
    return given


def test_drafts_behind_long_matches_get_longer_than_those_behind_short_ones() -> None:
    given = played(DraftPlanner(8, 512), {20: 0.9, 1: 0.2}, token_s=2e-4)
    long, short = (sum(lengths[place] for lengths in given[-100:]) / 100 for place in (0, 1))
    assert long > 6.0
    assert short < 2.0


def test_where_tokens_cost_as_much_as_steps_drafts_end_and_are_seldom_tried() -> None:
    planner = DraftPlanner(8, 512)
    given = played(planner, {20: 0.2, 1: 0.1}, token_s=1.0, steps=2_000)
    assert planner.mode is SpeculationMode.OFF
    assert sum(any(lengths) for lengths in given[-1_000:]) < 20


def test_drafts_begin_again_when_they_pay_again() -> None:
    planner = DraftPlanner(8, 512)
    assert not any(map(any, played(planner, {20: 0.0, 1: 0.0}, token_s=1e-4)[-40:]))
    played(planner, {20: 0.95, 1: 0.95}, token_s=1e-4, steps=40_000)
    assert planner.mode is SpeculationMode.ON


def test_a_batch_that_began_with_a_single_draft_learns_that_more_of_them_cost_little() -> None:
    planner, samples = DraftPlanner(8, 512), 8
    given = list[int]()
    for step in range(400):
        offers = [DraftOffer("g", 20, 1)] if step < 100 else [LONG] * samples
        lengths = planner.lengths(offers, samples) if planner.looks() else []
        for length in filter(None, lengths):
            planner.drafted("g", LONG.match, length, step % 2)
        planner.stepped(samples + sum(lengths), 0.025 + 1e-5 * (samples + sum(lengths)))
        given.append(sum(lengths))
    assert given[-1] >= samples


def test_a_step_that_was_held_up_teaches_no_cost() -> None:
    planner = DraftPlanner(8, 512)
    for tokens in (2, 6) * 50:
        planner.stepped(tokens, 0.01)
    planner.stepped(6, 30.0)
    for _ in range(8):
        planner.drafted("g", 20, 8, 8)
    assert sum(planner.lengths([LONG, LONG], 2)) >= 4


def test_of_a_forgotten_group_nothing_stays() -> None:
    planner = DraftPlanner(8, 512)
    before = planner.survival(LONG)
    for _ in range(50):
        planner.drafted("g", 20, 8, 0)
    own = planner.survival(LONG)
    planner.forget(["g"])
    assert planner.survival(LONG)[0] == pytest.approx(planner.survival(DraftOffer("other", 20, 8))[0])
    assert own[0] < planner.survival(LONG)[0] < before[0]
