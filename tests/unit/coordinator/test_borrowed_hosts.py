"""Laws of borrowing: what a host brings against what it costs, without flapping."""

import random
from typing import Any

import pytest

from ebbtide.coordinator.dispatch.borrowed_hosts import Lender, LenderSelection
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.serving_guard.governor.traffic_rhythm import TrafficRhythm

MANY = 1_000
EVERY_S = 2.0


def lender(name: str = "a", *, share: float = 0.8, disturbance: float = 0.0, slots: int = 8, **more: Any) -> Lender:
    return Lender(worker_id=name, slots=slots, share=share, disturbance=disturbance, **more)


def after(
    borrowing: LenderSelection, seconds: float, *lenders: Lender, wanting: int = MANY, start: float = 0.0
) -> list[str]:
    """Decide for so long; the names of those that are borrowed then."""
    now = start
    while now <= start + seconds:
        borrowing.decide(lenders, wanting, now)
        now += EVERY_S
    return [one.worker_id for one in lenders if borrowing.verdict(one.worker_id).wanted]


def test_a_host_that_is_not_known_is_borrowed() -> None:
    assert LenderSelection().verdict("a").wanted
    assert after(LenderSelection(), 0, lender()) == ["a"]


def test_a_host_that_brings_more_than_it_costs_is_kept() -> None:
    assert after(LenderSelection(), 3_600, lender(share=0.8, disturbance=0.5)) == ["a"]


def test_one_that_costs_more_than_it_brings_is_given_up_with_the_reason() -> None:
    borrowing = LenderSelection()
    assert after(borrowing, 40, lender(share=0.2, disturbance=0.5)) == []
    assert borrowing.verdict("a").reason == "it takes 50% of the error budget, and brings 20% of its speed"


def test_it_is_not_given_up_within_moments() -> None:
    assert after(LenderSelection(), 20, lender(share=0.2, disturbance=0.5)) == ["a"]


def test_a_used_up_error_budget_ends_it_at_once() -> None:
    borrowing = LenderSelection()
    assert after(borrowing, 0, lender(share=1.0, disturbance=1.0)) == []
    assert "error budget" in borrowing.verdict("a").reason


def test_a_host_brings_nothing_where_others_have_room_for_all() -> None:
    borrowing = LenderSelection()
    assert after(borrowing, 60, lender(disturbance=0.1), wanting=0) == []
    assert borrowing.verdict("a").reason == "others have room for all rollouts"
    assert after(borrowing, 60, lender(disturbance=0.0), wanting=8, start=60.0) == ["a"]


def test_a_host_that_has_no_time_left_is_told_so_and_not_that_others_have_room() -> None:
    borrowing = LenderSelection()
    assert after(borrowing, 60, lender(share=0.0, disturbance=0.1)) == []
    assert borrowing.verdict("a").reason == "it takes 10% of the error budget, and brings 0% of its speed"


def test_a_host_of_which_nothing_is_known_is_not_judged_until_it_was_seen_for_a_while() -> None:
    borrowing, unknown = LenderSelection(), lender(share=0.0, disturbance=2.0, known=False)
    assert after(borrowing, 600, unknown) == ["a"]
    assert after(borrowing, 20, lender(share=0.2, disturbance=0.5), start=602.0) == ["a"]
    assert after(borrowing, 20, lender(share=0.2, disturbance=0.5), start=624.0) == []
    assert after(borrowing, 600, unknown, start=646.0) == []


def test_a_host_given_up_is_borrowed_again_in_the_quiet_behind_it() -> None:
    rhythm, borrowing, seen = TrafficRhythm(0.01), LenderSelection(), []
    rhythm.turn(0.0, busy=True)
    rhythm.grant(0.0, granted=True)
    for second in range(1, 1_800, 2):
        now = float(second)
        if second < 300:
            rhythm.served(now, missed=second % 20 == 1)
        elif second == 301:
            rhythm.turn(now, busy=False)
        said = rhythm.forecast(now)
        one = lender(share=said.share, disturbance=said.disturbance)
        borrowing.decide([one], MANY, now)
        seen.append((second, borrowing.verdict("a").wanted))
    assert not all(wanted for second, wanted in seen if second < 300)
    assert all(wanted for second, wanted in seen if second > 1_000)


def test_a_host_that_disturbs_nobody_is_kept_even_if_it_is_not_needed() -> None:
    assert after(LenderSelection(), 3_600, lender(disturbance=0.0), wanting=0) == ["a"]


def test_the_end_of_a_training_step_gives_no_host_up() -> None:
    borrowing = LenderSelection()
    for step in range(20):
        assert after(borrowing, 30, lender(disturbance=0.1), wanting=64, start=60.0 * step) == ["a"]
        assert after(borrowing, 28, lender(disturbance=0.1), wanting=0, start=60.0 * step + 32) == ["a"]


def test_of_two_hosts_the_one_that_is_disturbed_more_is_given_up_where_one_is_enough() -> None:
    hosts = [lender("calm", disturbance=0.05), lender("tense", disturbance=0.3)]
    assert after(LenderSelection(), 120, *hosts, wanting=8) == ["calm"]
    assert after(LenderSelection(), 120, *hosts, wanting=16) == ["calm", "tense"]


def test_the_number_of_hosts_follows_from_need_and_cost_and_is_not_fixed() -> None:
    hosts = [lender(f"h{number:02d}", disturbance=0.1 + 0.01 * number) for number in range(20)]
    counts = [len(after(LenderSelection(), 120, *hosts, wanting=8 * need)) for need in (2, 5, 11, 20)]
    assert counts == [2, 5, 11, 20]


def test_what_half_the_rollouts_make_is_as_learnt() -> None:
    flat = WorkerThroughput()  # four rollouts make as much as eight
    for running in range(1, 9):
        flat.observe(running, 0.0, 10 * 100 * min(running, 4), 10.0)
    assert after(LenderSelection(), 60, lender(share=1.0, disturbance=0.7, speed=flat), wanting=4) == ["a"]
    assert after(LenderSelection(), 60, lender(share=1.0, disturbance=0.7), wanting=4) == []


def changes(borrowing: LenderSelection, lenders: Any, seconds: float) -> int:
    """How often the verdict changed. `lenders`: of the time and whether it is borrowed, the lender."""
    count, now, wanted = 0, 0.0, True
    while now < seconds:
        borrowing.decide([lenders(now, wanted)], MANY, now)
        count += borrowing.verdict("a").wanted is not wanted
        wanted = borrowing.verdict("a").wanted
        now += EVERY_S
    return count


@pytest.mark.parametrize("seed", range(20))
def test_noise_about_the_edge_does_not_flap(seed: int) -> None:
    draw = random.Random(seed)

    def noisy(_now: float, _wanted: bool) -> Lender:
        return lender(share=0.5, disturbance=0.5 * draw.uniform(0.8, 1.2))

    assert changes(LenderSelection(), noisy, 3_600) == 0


def test_a_host_that_is_quiet_only_while_it_is_left_alone_is_tried_ever_more_rarely() -> None:
    def fickle(_now: float, wanted: bool) -> Lender:
        return lender(share=0.5, disturbance=0.9 if wanted else 0.0)

    first = changes(LenderSelection(), fickle, 3_600)
    assert 4 <= first <= 14
    assert changes(LenderSelection(), fickle, 24 * 3_600) - first <= 2 * 48


def test_a_step_of_the_load_and_back_is_followed_and_all_is_calm_before_and_after() -> None:
    seen: list[tuple[float, bool]] = []

    def busy_for_a_while(now: float, wanted: bool) -> Lender:
        load = 600 <= now < 1_200
        seen.append((now, wanted))
        return lender(share=0.1 if load else 0.9, disturbance=0.4 if load and wanted else 0.02)

    assert changes(LenderSelection(), busy_for_a_while, 7_200) <= 10
    assert all(wanted for now, wanted in seen if now < 600 or now > 2_400)
    assert sum(wanted for now, wanted in seen if 600 <= now < 1_200) < 0.4 * 600 / EVERY_S


def test_a_good_hour_forgives() -> None:
    borrowing = LenderSelection()
    assert after(borrowing, 40, lender(share=0.1, disturbance=0.5)) == []
    assert after(borrowing, 3_600, lender(share=0.9), start=42.0) == ["a"]
    assert after(borrowing, 10, lender(share=0.1, disturbance=0.5), start=3_644.0) == []
    assert after(borrowing, 36, lender(share=0.9), start=3_656.0) == ["a"]


@pytest.mark.parametrize("seed", range(50))
def test_who_disturbs_more_or_brings_less_is_never_kept_where_a_better_one_is_not(seed: int) -> None:
    draw = random.Random(seed)
    share, disturbance = draw.uniform(0, 1), draw.uniform(0, 1.2)
    worse = lender(share=share * draw.random(), disturbance=disturbance + draw.random())
    better = after(LenderSelection(), 60, lender(share=share, disturbance=disturbance))
    assert better or not after(LenderSelection(), 60, worse)
