"""Slack tells until when rollouts may go on beside served requests, and their latencies teach what that costs."""

from math import inf
from random import Random

import pytest

from ebbtide.serving_guard.governor.costs import LEARNT, StepTime, UnloadedLatency
from ebbtide.serving_guard.governor.served_requests import AttainmentHeadroom, LatencyModel, ServedRequest, SlackBook

_PREFILL_S = 0.0001  # a token
_DECODE_S = 0.01


def book() -> SlackBook:
    unloaded = UnloadedLatency()
    for number in range(100):
        prompt = 100 + 100 * (number % 10)
        unloaded.began(prompt, _PREFILL_S * prompt)
        unloaded.decoded(1 + number % 3, _DECODE_S)
    return SlackBook(unloaded)


def arrive(one: SlackBook, *names: str, at: float = 0.0, prompt: int = 1000) -> None:
    for name in names:
        one.arrive(name, ServedRequest(arrived=at, prompt_tokens=prompt))


def test_nothing_inside_leaves_all_time() -> None:
    assert book().point(1.0, 0.1, 0.2) == inf


def test_without_an_aim_there_is_no_slack() -> None:
    one = book()
    arrive(one, "a")
    assert one.point(0.0, 0.1, 0.2) == -inf
    one.produce("a", 0.1, 1, 0.0)
    assert one.point(0.0, 0.1, 0.2) > 0.1
    assert one.point(0.0, 0.0, 0.2) == -inf


def test_one_that_waits_needs_its_prefill_before_its_deadline() -> None:
    one = book()
    arrive(one, "a", at=5.0)
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.1, rel=1e-6)


def test_a_queue_needs_the_prefill_of_all_ahead() -> None:
    one = book()
    arrive(one, "a", "b", "c", at=5.0)
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.3, rel=1e-6)
    one.end("a")
    assert one.point(1.0, 0.1, 0.2) == pytest.approx(5.0 + 1.0 - 0.2, rel=1e-6)


def test_those_that_decode_make_tokens_between_the_prefills_of_those_that_wait() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 0.1, 1, 0.0)
    arrive(one, "b", at=5.0)
    assert one.point(1.0, 9.0, 9.0) == pytest.approx(5.0 + 1.0 - 0.1 - _DECODE_S, rel=1e-6)


def test_the_pause_after_a_token_and_the_mean_both_stay_within_their_aims() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 1.0, 1, 0.0)
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.0 + 0.05 - _DECODE_S)
    one.produce("a", 1.01, 1, 0.0)  # what it was ahead of its mean it may lose
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.01 + 0.08 - _DECODE_S)
    one.produce("a", 1.30, 1, 0.0)  # and one that is behind its mean may lose nothing
    assert one.point(1.0, 0.05, 0.08) < 1.30


def test_the_least_slack_of_all_counts() -> None:
    one = book()
    arrive(one, "a", "b")
    one.produce("a", 1.0, 1, 0.0)
    one.produce("b", 1.02, 1, 0.0)
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.0 + 0.05 - _DECODE_S)
    one.end("a")
    assert one.point(1.0, 0.05, 0.08) == pytest.approx(1.02 + 0.05 - _DECODE_S)


def test_other_aims_hold_at_once_for_those_inside() -> None:
    one = book()
    arrive(one, "a")
    one.produce("a", 1.0, 1, 0.0)
    for aim in (0.05, 0.2, 0.03):
        assert one.point(1.0, aim, 0.5) == pytest.approx(1.0 + aim - _DECODE_S)


def test_one_that_is_not_inside_changes_nothing() -> None:
    one = book()
    assert one.produce("a", 1.0, 1, 0.0) is None
    assert one.end("a") is None
    assert one.last("a") is None
    assert len(one) == 0


class Scene:
    def __init__(self) -> None:
        self.unloaded, self.steps = UnloadedLatency(), StepTime(16)
        self.lessons = LatencyModel(self.unloaded, self.steps)
        self.now = 0.0

    def served(self, ttft: float, *, beside: float = 0.0, alone: bool = True, streamed: bool = True) -> ServedRequest:
        """One request whose first token came `ttft` after it, with a rollout step beside it for so long."""
        self.now += 10.0
        request = self.lessons.arrived(self.now, 1000, alone=alone, streamed=streamed)
        if beside:
            self.lessons.stepped(self.now + beside, 32, beside, beside=True)
        request.first = request.last = self.now + ttft
        request.tokens = 1
        self.lessons.began(request, 0.5)
        return request

    def decoded(self, request: ServedRequest, pause: float) -> None:
        since, request.last = request.last, request.last + pause
        before, request.beside_last = request.beside_last, self.lessons.beside
        request.tokens += 1
        self.lessons.went_on(request, since, 1, request.beside_last - before)


def test_one_alone_teaches_its_latency_less_the_step_that_it_found_under_way() -> None:
    scene = Scene()
    for _ in range(LEARNT):
        scene.served(0.11, beside=0.01)
    assert scene.unloaded.ttft_s(99.0) == pytest.approx(0.1)


def test_one_among_others_or_in_one_piece_teaches_no_latency() -> None:
    scene = Scene()
    for _ in range(LEARNT):
        scene.served(0.1, alone=False)
        scene.served(0.1, streamed=False)
    assert scene.unloaded.ttft_s(99.0) == 0.0


def test_another_arrival_ends_being_alone() -> None:
    scene = Scene()
    for _ in range(LEARNT):
        first = scene.lessons.arrived(scene.now, 1000, alone=True)
        scene.served(0.1, alone=False)
        first.first = scene.now
        scene.lessons.began(first, 0.5)
    assert scene.unloaded.ttft_s(99.0) == 0.0


def test_a_pause_with_a_rollout_step_in_it_or_with_leave_for_one_is_not_learnt() -> None:
    scene = Scene()
    request = scene.served(0.1)
    scene.lessons.stepped(request.last + 0.01, 32, 0.008, beside=True)
    scene.decoded(request, 0.03)
    scene.lessons.may_step(request.last + 0.02)
    scene.decoded(request, 0.03)
    assert scene.unloaded.decode_s(1) == inf
    scene.decoded(request, 0.01)
    assert scene.unloaded.decode_s(1) < 0.03


def test_only_a_miss_that_rollouts_caused_is_held_against_them() -> None:
    scene = Scene()
    assert scene.served(0.505, beside=0.01).missed
    assert not scene.served(0.6, beside=0.01).missed
    assert not scene.served(0.49, beside=0.01).missed
    assert not scene.served(0.505).missed


def test_a_mean_that_rollouts_pushed_over_the_target_is_a_miss() -> None:
    scene = Scene()
    request = scene.served(0.1)
    for _ in range(10):
        scene.decoded(request, 0.01)
    scene.lessons.stepped(request.last, 32, 0.05, beside=True)
    scene.decoded(request, 0.06)
    scene.lessons.ended(request.last, request, 0.012, ok=True)
    assert request.missed


@pytest.mark.parametrize(("excess", "contention"), [(0.01, 1.0), (0.04, 4.0)])
def test_contention_is_the_delay_per_second_of_overlap(excess: float, contention: float) -> None:
    scene = Scene()
    assert scene.lessons.contention == 1.0
    for _ in range(50):
        scene.served(0.1)
    for _ in range(30):
        scene.served(0.1 + excess, beside=0.01)
    assert scene.lessons.contention == pytest.approx(contention, rel=0.35)


@pytest.mark.parametrize(("ratio", "delay", "gained"), [(2.0, 0.5, 0.0), (1.25, 0.2, 0.6), (2.0, 1.5, -1.0)])
def test_what_sharing_brings_is_the_rollouts_progress_less_the_delay_of_served_tokens(
    ratio: float, delay: float, gained: float
) -> None:
    scene = Scene()
    for _ in range(30):
        scene.lessons.stepped(scene.now, 32, 0.01, beside=False)
    request = scene.served(0.1)
    for _ in range(60):
        scene.decoded(request, 0.01)
    assert scene.lessons.gained is None
    for _ in range(400):
        scene.lessons.stepped(request.last + 0.01, 32, 0.01 * ratio, beside=True)
        scene.decoded(request, 0.01 + 0.01 * ratio * delay)
    assert scene.lessons.gained == pytest.approx(gained, abs=0.1)


@pytest.mark.parametrize(("slower", "forgotten"), [(1.1, False), (1.5, True), (0.6, True)])
def test_what_sharing_brings_is_learnt_anew_where_the_engine_has_another_speed(slower: float, forgotten: bool) -> None:
    scene = Scene()
    for _ in range(30):
        scene.lessons.stepped(scene.now, 32, 0.01, beside=False)
    request = scene.served(0.1)
    for _ in range(60):
        scene.decoded(request, 0.02)
    for _ in range(200):
        scene.lessons.stepped(request.last + 0.02, 32, 0.02, beside=True)
        scene.decoded(request, 0.06)
    assert scene.lessons.gained is not None
    assert not scene.lessons.forget_other_speeds()
    for _ in range(1500):
        scene.decoded(request, 0.02 * slower)
    assert scene.lessons.forget_other_speeds() == forgotten
    assert (scene.lessons.gained is None) == forgotten


_TARGET = 1.4


def served(own: list[float], *, allowed: float = 0.01, missed: bool = False) -> AttainmentHeadroom:
    headroom = AttainmentHeadroom(allowed)
    for one in own:
        headroom.served(one, _TARGET, missed=missed)
    return headroom


def test_nothing_known_leaves_nothing() -> None:
    assert served([]).within(_TARGET) == 0.0


def test_requests_far_from_their_target_leave_much() -> None:
    assert served([1.0] * 100).within(_TARGET) == pytest.approx(0.4)


def test_as_many_as_may_miss_do_not_count() -> None:
    assert served([1.0] * 127 + [1.39]).within(_TARGET) == pytest.approx(0.4)
    assert served([1.0] * 126 + [1.38, 1.39]).within(_TARGET) == pytest.approx(0.02)


def test_a_miss_that_no_rollout_caused_says_nothing() -> None:
    assert served([1.0] * 20 + [5.0] * 20).within(_TARGET) == pytest.approx(0.4)
    assert served([5.0] * 20).within(_TARGET) == 0.0


def test_a_miss_that_rollouts_caused_leaves_nothing() -> None:
    headroom = served([1.0] * 20)
    headroom.served(1.45, _TARGET, missed=True)
    assert headroom.within(_TARGET) == 0.0


def test_a_disturbance_is_forgotten() -> None:
    assert served([1.0] * 10 + [1.39] * 50 + [1.0] * 128).within(_TARGET) == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(20))
def test_few_enough_of_the_last_requests_would_have_missed_by_it(seed: int) -> None:
    random, allowed = Random(seed), 0.05
    own = [random.lognormvariate(0.0, 0.3) for _ in range(128)]
    delay = served(own, allowed=allowed).within(_TARGET)
    assert sum(_TARGET - delay < one - 1e-9 <= _TARGET for one in own) <= allowed * len(own)


def test_without_a_target_nothing_is_near_it() -> None:
    assert served([1.0]).within(inf) == inf
