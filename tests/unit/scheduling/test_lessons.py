"""Latencies and delays are learnt from served requests and rollout steps."""

from math import inf

import pytest

from ebbtide.serving_guard.governor.costs import LEARNT, StepTime, UnloadedLatency
from ebbtide.serving_guard.governor.served_requests import LatencyModel, ServedRequest


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
