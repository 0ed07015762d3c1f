"""Who starts next: probes, then the longest, nobody too late, and no free memory idle without need."""

from random import Random
from typing import Any

import pytest

from ebbtide.scheduling.long_tail.start_order import RunningSample, StartOrder, WaitingSample


def sample(name: str, **changes: Any) -> WaitingSample:
    fields: dict[str, Any] = {
        "sample": name, "group": name.split(".", maxsplit=1)[0], "rest": 100.0, "longest_rest": 200.0, "kv_tokens": 10,
        "since_s": 0.0, "place": 0, "probed": True,
    }  # fmt: skip
    return WaitingSample(**{**fields, **changes})


def names(order: StartOrder) -> list[str]:
    return [one.sample for one in order]


def test_a_probe_of_each_group_goes_first_and_then_the_longest() -> None:
    waiting = [
        sample("a.0", rest=900.0),
        sample("b.1", rest=50.0, place=1, probed=False),
        sample("b.0", rest=60.0, place=0, probed=False),
        sample("c.0", rest=800.0),
    ]
    assert names(StartOrder(waiting, 0.0)) == ["b.0", "a.0", "c.0", "b.1"]


def test_of_probes_that_of_the_group_known_to_be_long_goes_first() -> None:
    waiting = [sample("a.0", rest=100.0, probed=False), sample("b.0", rest=700.0, place=1, probed=False)]
    assert names(StartOrder(waiting, 0.0)) == ["b.0", "a.0"]


def test_one_that_waited_too_long_goes_before_all_others() -> None:
    waiting = [
        sample("a.0", rest=900.0, since_s=95.0),
        sample("b.0", probed=False),
        sample("c.0", rest=1.0, since_s=5.0),
    ]
    assert names(StartOrder(waiting, 100.0, oldest_s=90.0)) == ["b.0", "c.0", "a.0"]


def test_what_fits_beside_the_first_one_fills_the_memory_that_it_waits_for() -> None:
    waiting = [sample("a.0", rest=900.0, kv_tokens=80), sample("b.0", rest=300.0, longest_rest=500.0, kv_tokens=30)]
    running = [RunningSample(400.0, 60)]
    order = StartOrder(waiting, 0.0)
    # In 400 tokens 100 are free: 80 for the first one leave 20, and b.0 needs 30 for longer than that.
    assert [one.sample for one in order.take(40, running)] == []
    waiting[1] = sample("b.0", rest=300.0, longest_rest=390.0, kv_tokens=30)
    assert [one.sample for one in StartOrder(waiting, 0.0).take(40, running)] == ["b.0"]
    waiting[1] = sample("b.0", rest=300.0, longest_rest=900.0, kv_tokens=20)
    assert [one.sample for one in StartOrder(waiting, 0.0).take(40, running)] == ["b.0"]


def test_nothing_starts_beside_one_that_waited_too_long_and_does_not_fit() -> None:
    waiting = [sample("a.0", kv_tokens=80), sample("b.0", since_s=95.0, longest_rest=1.0)]
    order = StartOrder(waiting, 100.0, oldest_s=50.0)
    assert order.take(40, [RunningSample(400.0, 60)]) == []
    assert names(order) == ["a.0", "b.0"]


def test_one_that_fits_no_engine_delays_nobody() -> None:
    waiting = [sample("a.0", rest=900.0, kv_tokens=1_000), sample("b.0")]
    assert [one.sample for one in StartOrder(waiting, 0.0).take(40)] == ["b.0"]
    overdue = StartOrder(waiting, 100.0, oldest_s=50.0)
    assert [one.sample for one in overdue.take(40)] == ["b.0"]


def test_what_one_engine_took_the_next_one_does_not_get() -> None:
    order = StartOrder([sample(f"{at}.0", rest=100.0 - at) for at in range(5)], 0.0)
    assert [one.sample for one in order.take(1_000, slots=2)] == ["0.0", "1.0"]
    assert [one.sample for one in order.take(1_000, slots=2)] == ["2.0", "3.0"]
    assert names(order) == ["4.0"]


@pytest.mark.parametrize("seed", range(20))
def test_more_is_never_taken_than_there_is(seed: int) -> None:
    draw = Random(seed)
    waiting = [
        sample(
            f"{at % 7}.{at}", rest=draw.uniform(1, 900), longest_rest=draw.uniform(1, 2_000), place=at,
            kv_tokens=draw.randint(1, 60), since_s=draw.uniform(0, 100), probed=draw.random() < 0.5,
        )
        for at in range(40)
    ]  # fmt: skip
    running = [RunningSample(draw.uniform(1, 900), draw.randint(1, 60)) for _ in range(6)]
    order, free, slots = StartOrder(waiting, 100.0, oldest_s=draw.choice((50.0, 1e9))), draw.randint(0, 300), 12
    taken = order.take(free, running, slots)
    assert sum(one.kv_tokens for one in taken) <= free
    assert len(taken) <= slots
    assert sorted([*names(order), *(one.sample for one in taken)]) == sorted(one.sample for one in waiting)


def test_under_steady_arrival_of_longer_ones_a_short_sample_starts_within_the_bound() -> None:
    waiting, started, oldest_s = [sample("old.0", rest=1.0)], None, 30.0
    for second in range(200):
        waiting += [sample(f"n{second}.{at}", rest=500.0, since_s=float(second), place=second) for at in range(2)]
        order = StartOrder(waiting, float(second), oldest_s=oldest_s)
        taken = order.take(10)
        waiting = list(order)
        if any(one.sample == "old.0" for one in taken):
            started = second
            break
    assert started is not None
    assert started <= oldest_s + 1
