"""Unlike workers of one pool: speeds by kind, slots by memory, and which rollouts go where."""

import random
from math import inf
from typing import Any

import pytest

from ebbtide.coordinator.dispatch.capacity import PeakTokens, memory_slots
from ebbtide.coordinator.dispatch.speeds import KindCurve, SeenEngine, SpeedCurve
from ebbtide.coordinator.forecasts.length_learner import LengthCurve, LengthLearner
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.placement import place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.coordinator.rules.worker_view import WorkerView
from ebbtide.step_pacing import VersionBounds
from tests.unit.coordinator.forecasts.drawn_lengths import known_lengths

STEP_S, ROLLOUT_S = 0.02, 0.0005


def seen(*loads: int, slowness: float = 1.0) -> WorkerThroughput:
    """A worker that was seen at these loads, for half a minute each."""
    speed = WorkerThroughput()
    for load in loads:
        token_s = slowness * (STEP_S + ROLLOUT_S * load)
        for _ in range(30):
            speed.observe(load, 1000.0, round(load / token_s), 1.0)
    return speed


def rate(load: int, slowness: float = 1.0) -> float:
    return 1.0 / (slowness * (STEP_S + ROLLOUT_S * load))


def curve(kind: list[WorkerThroughput], own: WorkerThroughput | None = None) -> SpeedCurve:
    """Of one more worker of a kind; `own`: what was seen of it."""
    fleet = [SeenEngine(speed, 1000.0) for speed in [*kind, *([own] if own else [])]]
    learnt = KindCurve.learnt(fleet)
    assert learnt is not None
    return learnt.of(SeenEngine(own, 1000.0))


def test_a_worker_of_which_nothing_is_known_is_as_fast_as_its_kind() -> None:
    for own in (None, WorkerThroughput()):
        found = curve([seen(4, 16, 64), seen(8, 32)], own)
        for load in (4, 10, 64):
            assert found.rate(load) == pytest.approx(rate(load), rel=0.02)


def test_little_is_promised_that_no_worker_of_the_kind_has_shown() -> None:
    found = curve([seen(8, 16)])
    assert rate(8) < found.rate(7) < found.rate(1) <= 1.5 * rate(8)
    assert found.rate(64) == pytest.approx(rate(16) / 4, rel=0.02)


def test_a_worker_slower_than_its_kind_is_so_at_loads_at_which_it_was_not_seen() -> None:
    found = curve([seen(2, 8, 16, 64) for _ in range(9)], seen(16, slowness=1.5))
    for load in (2, 16, 64):
        assert found.rate(load) == pytest.approx(rate(load, 1.5), rel=0.03)


def test_workers_that_are_nearly_as_fast_as_their_kind_count_as_alike() -> None:
    kind = [seen(2, 8, 32) for _ in range(9)]
    assert curve(kind, seen(8, slowness=1.06)) == curve(kind, seen(8, slowness=0.95))
    assert curve(kind, seen(8, slowness=1.3)).rate(8) == pytest.approx(rate(8, 1.3), rel=0.02)


def test_a_kind_of_slow_and_fast_workers_seen_at_different_loads_has_the_shape_of_each() -> None:
    """Else the fast ones, seen alone at small loads, would make a small load look fast for all."""
    kind = [seen(8, 16, 32, slowness=1.3) for _ in range(4)] + [seen(2, 4, 8, 16) for _ in range(4)]
    slow = curve(kind, seen(16, 32, slowness=1.3))
    assert slow.rate(2) == pytest.approx(rate(2, 1.3), rel=0.08)


def test_a_worker_that_was_held_up_while_it_was_observed_is_not_believed() -> None:
    held_up = seen(8, slowness=1e4)
    assert curve([seen(4, 8, 16)], held_up).rate(8) == pytest.approx(rate(8), rel=0.02)


def test_longer_contexts_slow_down_a_worker_as_they_do_its_kind() -> None:
    speeds = [WorkerThroughput() for _ in range(4)]
    for at, speed in enumerate(speeds):
        for load in (4, 8, 16):
            for context in (1500.0, 2500.0, 3500.0):
                speed.observe(load, context, round(load / (0.01 + 5e-6 * context) * (30.0 + at)), 30.0 + at)
    learnt = KindCurve.learnt([SeenEngine(speed, 2500.0) for speed in speeds])
    assert learnt is not None
    for context in (1000.0, 4000.0):
        assert learnt.of(SeenEngine(None, context)).rate(16) == pytest.approx(1.0 / (0.01 + 5e-6 * context), rel=0.15)


def test_of_nobody_nothing_is_known() -> None:
    assert KindCurve.learnt([]) is None
    assert KindCurve.learnt([SeenEngine(WorkerThroughput(), 0.0), SeenEngine(None, 0.0)]) is None


def exponential(mean: float, count: int = 4_000) -> LengthCurve:
    draw = random.Random(0)
    return known_lengths([max(1, round(draw.expovariate(1.0 / mean))) for _ in range(count)])


def test_rollouts_that_begin_together_are_as_many_as_fit_at_their_peak() -> None:
    """Of exponential lengths `exp(-t/m) t` are held after t tokens: at most m/e, when t is m."""
    slots = memory_slots(PeakTokens(exponential(1000.0), 0.0), kv_tokens=100_000, most=1024, running=0, made=0.0)
    assert slots == pytest.approx(0.95 * 100_000 / (1000 / 2.718), rel=0.05)


def test_a_fleet_in_the_midst_of_its_work_is_filled_to_about_its_memory() -> None:
    """In the long run a rollout of exponential length holds the mean."""
    draw, lengths, kv_tokens = random.Random(1), exponential(1000.0), 400_000
    ages = [0.0] * 200
    left = [draw.expovariate(1e-3) for _ in ages]
    held = []
    for step in range(600):
        for at, _ in enumerate(ages):
            ages[at] += 25
            left[at] -= 25
        kept = [at for at, rest in enumerate(left) if rest > 0]
        ages, left = [ages[at] for at in kept], [left[at] for at in kept]
        made = sum(ages) / max(1, len(ages))
        slots = memory_slots(PeakTokens(lengths, 0.0), kv_tokens=kv_tokens, most=4096, running=len(ages), made=made)
        new = max(0, slots - len(ages))
        ages += [0.0] * new
        left += [draw.expovariate(1e-3) for _ in range(new)]
        if step >= 200:
            held.append(sum(ages))
    assert 0.7 * kv_tokens < sum(held) / len(held) < kv_tokens
    assert max(held) < 1.1 * kv_tokens


def test_the_set_slots_are_the_ceiling_and_one_is_the_floor() -> None:
    peaks = PeakTokens(exponential(1000.0), 500.0)
    assert memory_slots(peaks, kv_tokens=10_000_000, most=64, running=0, made=0.0) == 64
    assert memory_slots(peaks, kv_tokens=300, most=64, running=0, made=0.0) == 1
    assert memory_slots(peaks, kv_tokens=0, most=64, running=0, made=0.0) == 64  # it does not say what it holds


def test_rollouts_that_became_too_long_for_the_memory_are_not_replaced_until_the_rest_fit() -> None:
    peaks = PeakTokens(exponential(1000.0), 500.0)
    fit = memory_slots(peaks, kv_tokens=20_000, most=64, running=0, made=0.0)
    assert 1 < fit < 40
    for running in (40, fit + 1, fit):
        assert memory_slots(peaks, kv_tokens=20_000, most=64, running=running, made=4000.0) == fit
    assert memory_slots(peaks, kv_tokens=20_000, most=64, running=fit - 1, made=4000.0) == fit - 1


def test_a_third_of_the_memory_makes_a_third_of_the_slots() -> None:
    peaks = PeakTokens(exponential(2000.0), 256.0)
    large, small = (
        memory_slots(peaks, kv_tokens=kv_tokens, most=4096, running=0, made=0.0) for kv_tokens in (600_000, 200_000)
    )
    assert small == pytest.approx(large / 3, abs=1)


def test_peaks_never_fall_below_what_is_held_now() -> None:
    for lengths in (LengthLearner().curve, exponential(300.0), exponential(9000.0, 30)):
        peaks = PeakTokens(lengths, 100.0)
        for made in (0.0, 1.0, 33.0, 500.0, 20_000.0, 1e9):
            assert peaks.of(made) >= 100.0 + made


def waiting(number: int, made: int = 0, **more: Any) -> QueuedRollout:
    return QueuedRollout(
        rollout_id=f"r{number}", episode_id=f"e{number}", bounds=VersionBounds(0, 0), length=100 + made, made=made,
        place=number, **more,
    )  # fmt: skip


def worker(name: str, tokens_per_s: float, **more: Any) -> WorkerView:
    known: dict[str, Any] = {"slots": 2, "running": 0, "installed": 1, "target": 1, "max_model_len": 100_000}
    return WorkerView(session_id=name, worker_id=name, rate=tokens_per_s, **(known | more))


def placed(rollouts: list[QueuedRollout], *workers: WorkerView) -> dict[str, str]:
    queue = RolloutQueue()
    for one in rollouts:
        queue.add(one)
    return dict(place(queue, workers, {}, rest=lambda one: 1000.0 + one.made))


@pytest.mark.parametrize("rates", [(50.0, 48.0), (0.0, 0.0)])
def test_among_like_workers_the_order_of_the_queue_decides(rates: tuple[float, float]) -> None:
    first, second = rates
    rollouts = [waiting(0), waiting(1), waiting(2, 8000), waiting(3, 9000)]
    plain = [waiting(number) for number in range(4)]
    fleet = worker("a", first), worker("b", second)
    assert placed(rollouts, *fleet) == placed(plain, *fleet)


def test_every_rollout_is_placed_once_and_no_worker_gets_more_than_its_slots() -> None:
    draw = random.Random(3)
    for _ in range(200):
        rollouts = [waiting(number, draw.choice((0, 0, 500, 9000))) for number in range(draw.randrange(1, 30))]
        fleet = [
            worker(f"w{at}", draw.choice((30.0, 90.0)), slots=draw.randrange(1, 8), spell_s=draw.choice((inf, 3600.0)))
            for at in range(draw.randrange(1, 6))
        ]
        found = placed(rollouts, *fleet)
        assert len(found) == min(len(rollouts), sum(one.slots for one in fleet))
        for one in fleet:
            assert sum(name == one.session_id for name in found.values()) <= one.slots
