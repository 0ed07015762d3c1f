"""Laws of how runs share workers."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from ebbtide.scheduling.allotment import Demand, Post, allot


def post(name: str, run_id: str = "", since: float = 0.0, running: int = 0, unfit: Sequence[str] = ()) -> Post:
    return Post(worker_id=name, run_id=run_id, since=since, running=running, unfit=frozenset(unfit))


def demand(run_id: Any, served: Any = 0.0) -> Any:
    return Demand(run_id=run_id, served=served)


def share(posts: Any, demands: Any, now: Any = 100.0, slice_s: Any = 10.0) -> Any:
    return allot(posts, demands, now=now, slice_s=slice_s)


def test_without_demand_everybody_stays() -> None:
    assert share([post("a", "x"), post("b")], []) == {"a": "x", "b": ""}


def test_one_run_gets_all_and_two_get_half_each_without_needless_moves() -> None:
    posts = [post(f"w{number}", "x") for number in range(4)]
    assert set(share(posts, [demand("x")]).values()) == {"x"}
    found = share(posts, [demand("x"), demand("y")])
    assert Counter(found.values()) == {"x": 2, "y": 2}
    again = share([post(name, run_id) for name, run_id in found.items()], [demand("x"), demand("y")])
    assert again == found


def test_busy_workers_are_the_last_to_move() -> None:
    posts = [post("idle", "x"), post("busy", "x", running=7)]
    assert share(posts, [demand("x"), demand("y")]) == {"idle": "y", "busy": "x"}


def test_an_odd_worker_does_not_wander() -> None:
    posts = [post("a", "x"), post("b", "x"), post("c", "y")]
    for _ in range(5):
        assert share(posts, [demand("y"), demand("x")]) == {"a": "x", "b": "x", "c": "y"}


def test_with_fewer_workers_than_runs_a_worker_goes_on_when_its_time_is_up() -> None:
    demands = [demand("x", served=100.0), demand("y", served=50.0), demand("z", served=70.0)]
    assert share([post("a", "x", since=95.0)], demands) == {"a": "x"}
    assert share([post("a", "x", since=80.0)], demands) == {"a": "y"}


def test_a_worker_is_never_given_what_it_cannot_install() -> None:
    posts = [post("a", "x", unfit=["x"]), post("b", "", unfit=["x", "y"])]
    assert share(posts, [demand("x"), demand("y")]) == {"a": "y", "b": ""}


@pytest.mark.parametrize("seed", range(200))
def test_shares_differ_by_one_at_most_and_settle(seed: Any) -> None:
    draw = random.Random(seed)
    runs = [f"r{number}" for number in range(draw.randint(1, 5))]
    posts = [
        post(f"w{number}", draw.choice(["", "gone", *runs]), draw.uniform(0, 100), draw.randint(0, 5))
        for number in range(draw.randint(1, 12))
    ]
    demands = [demand(run_id, draw.uniform(0, 100)) for run_id in runs]
    found = share(posts, demands)
    counts = Counter(dict.fromkeys(runs, 0))
    counts.update(found.values())
    assert set(found) == {one.worker_id for one in posts}
    assert max(counts.values()) - min(counts.values()) <= 1
    if len(posts) >= len(runs):
        settled = [post(name, run_id, since=100.0) for name, run_id in found.items()]
        assert share(settled, demands) == found
