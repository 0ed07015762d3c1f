"""Who is silent, and which attempts were in vain."""

import random
from typing import Any

import pytest

from ebbtide.coordinator.rules.liveness import JUDGE_EVERY_S, Liveness, Returning
from ebbtide.coordinator.rules.placement import blames, dead_letter_message
from ebbtide.types.fleet import EndCause


def judged(liveness: Any, until: Any, step: Any = 0.5, start: Any = 0.0) -> Any:
    """Sessions found silent while judging from `start` on, with when."""
    found: dict[str, float] = {}
    now = start
    while now <= until:
        for session in liveness.silent(now):
            found.setdefault(session, now)
        now += step
    return found


def test_a_silent_worker_is_found_soon_after_the_timeout() -> None:
    liveness = Liveness(5.0)
    liveness.heard("a", 0.0)
    assert judged(liveness, 5.0) == {}
    assert judged(liveness, 6.0, start=5.5) == {"a": 5.5}


def test_a_worker_heard_in_time_is_never_silent() -> None:
    liveness = Liveness(5.0)
    for now in range(60):
        liveness.heard("a", float(now))
        assert liveness.silent(now + 0.5) == []


def test_the_judges_own_sleep_counts_against_nobody() -> None:
    liveness = Liveness(5.0)
    liveness.heard("a", 0.0)
    assert judged(liveness, 2.0) == {}
    assert liveness.silent(32.0) == []  # asleep for 30 s
    assert judged(liveness, 34.5, start=32.5) == {}
    assert judged(liveness, 40.0, start=35.0) == {"a": 35.5}  # 5 s of wakefulness since it was heard


def test_who_is_heard_after_our_sleep_is_found_as_soon_as_ever() -> None:
    liveness = Liveness(2.5)
    liveness.heard("a", 0.0)
    liveness.silent(0.25)
    liveness.heard("a", 3.1)
    assert liveness.silent(3.25) == []  # asleep for 3 s
    assert liveness.since("a", 3.25) == 0.0
    assert judged(liveness, 10.0, step=0.25, start=3.5) == {"a": 6.0}


def test_a_forgotten_session_is_never_silent() -> None:
    liveness = Liveness(1.0)
    liveness.heard("a", 0.0)
    assert liveness.since("a", 0.5) == 0.5
    liveness.forget("a")
    assert judged(liveness, 10.0) == {}
    assert liveness.since("a", 10.0) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_default_finds_silence_within_three_seconds_and_no_one_who_is_late(seed: Any) -> None:
    """Heartbeats of 1 s with up to 500 ms of jitter each, and a judge that is itself up to 300 ms late."""
    draw, liveness = random.Random(seed), Liveness()
    dies = 120.0 + draw.random()
    beats = sorted(beat + draw.uniform(0.0, 0.5) for beat in range(int(dies)))
    now, found = 0.0, None
    while found is None:
        while beats and beats[0] <= now:
            liveness.heard("a", beats.pop(0))
        found = now if liveness.silent(now) else None
        now += JUDGE_EVERY_S + (draw.uniform(0.0, 0.3) if draw.random() < 0.1 else 0.0)
    assert not beats
    assert found - dies <= 3.0


def test_where_heartbeats_come_late_each_has_more_time_for_a_while() -> None:
    liveness = Liveness(2.5)
    for name in ("a", "b"):
        liveness.heard(name, 0.0)
    assert judged(liveness, 2.25, step=0.25) == {}
    liveness.heard("a", 2.4)  # 0.65 s later than is usual
    assert judged(liveness, 3.75, step=0.25, start=2.5) == {}
    assert judged(liveness, 4.0, step=0.25, start=4.0) == {"b": 4.0}
    liveness.forget("b")
    for now in range(4, 30):
        liveness.heard("a", float(now))
        liveness.silent(float(now))
    assert judged(liveness, 33.0, step=0.25, start=29.25) == {"a": 31.75}  # that was long ago


def test_many_that_fall_silent_at_once_have_more_time_and_are_found_all_the_same() -> None:
    liveness = Liveness(2.5)
    names = [f"w{number}" for number in range(100)]
    for name in names:
        liveness.heard(name, 0.0)
    assert judged(liveness, 8.5, step=0.25) == {}
    assert judged(liveness, 9.0, step=0.25, start=8.75).keys() == set(names)


def test_a_judge_that_is_late_has_more_patience_up_to_a_bound() -> None:
    for late_s, found_s in ((0.0, 2.75), (2.0, 4.75), (60.0, 8.75)):
        liveness = Liveness(2.5)
        liveness.heard("a", 0.0)
        now = 0.0
        while not liveness.silent(now, late_s):
            now += 0.25
        assert now == found_s


@pytest.mark.parametrize("cause", EndCause)
def test_only_failures_and_losses_may_be_the_rollouts(cause: EndCause) -> None:
    assert blames(cause) is (cause in {EndCause.FAILED, EndCause.WORKER_LOST, EndCause.WORKER_SUSPECTED})


def test_a_dead_letter_says_how_often_and_why() -> None:
    assert dead_letter_message(4, "x; ", limit=5) is None
    message = dead_letter_message(5, "attempt on w1 at token 0: engine error; ", limit=5)
    assert message == "5 attempts in a row ended without a new token: attempt on w1 at token 0: engine error"


def test_workers_are_awaited_while_others_come_back_and_for_half_a_minute_at_most() -> None:
    returning = Returning()
    assert returning.more_s(0.0) == 0.0, "a coordinator that never took over"
    returning.begin(100.0)
    assert returning.more_s(100.0) == 0.0, "nobody came yet: the grace alone counts"
    returning.came(104.0)
    assert returning.more_s(105.9) > 0.0
    assert returning.more_s(106.1) == 0.0, "two seconds without another"
    for late in range(106, 140):
        returning.came(float(late))
    assert returning.more_s(129.0) > 0.0
    assert returning.more_s(131.0) == 0.0
