"""Laws of which run each worker serves: over simulated time, by the code that decides in the coordinator."""

import random
from collections import Counter
from typing import Any

import pytest

from ebbtide.coordinator.rules.fair_share import Demand, WorkerPost, allot
from tests.unit.coordinator.shared_fleet import Fleet, Worker, fleet


def demand(run_id: str, **more: Any) -> Demand:
    return Demand(run_id=run_id, **more)


def post(name: str, run_id: str = "", **more: Any) -> WorkerPost:
    return WorkerPost(
        session_id=name, run_id=run_id, has=more.pop("has", run_id), **({"since": 0.0, "running": 0} | more)
    )


def decided(posts: list[WorkerPost], demands: list[Demand], **more: Any) -> dict[str, str]:
    return allot(posts, demands, **({"now": 1000.0, "timeslice_s": 2.0} | more))


def shares(tokens: Counter[str]) -> dict[str, float]:
    return {run_id: count / sum(tokens.values()) for run_id, count in tokens.items()}


# -- one decision ------------------------------------------------------------------------------------------------------


def test_without_demand_everybody_stays() -> None:
    assert decided([post("a", "x"), post("b")], []) == {"a": "x", "b": ""}


def test_one_run_gets_all_and_two_get_half_each_without_needless_changes() -> None:
    posts = [post(f"w{number}", "x") for number in range(4)]
    assert set(decided(posts, [demand("x")]).values()) == {"x"}
    found = decided(posts, [demand("x"), demand("y")])
    assert Counter(found.values()) == {"x": 2, "y": 2}
    again = decided([post(name, run_id) for name, run_id in found.items()], [demand("x"), demand("y")])
    assert again == found


def test_busy_workers_are_the_last_to_change() -> None:
    posts = [post("idle", "x"), post("busy", "x", running=7)]
    assert decided(posts, [demand("x"), demand("y")]) == {"idle": "y", "busy": "x"}


def test_who_has_a_runs_weights_goes_to_it_before_others() -> None:
    posts = [post("a", "x", has="x", change_s=0.2), post("b", "x", has="y", running=9, change_s=0.2)]
    assert decided(posts, [demand("x"), demand("y")]) == {"a": "x", "b": "y"}
    free = [post("a", "gone", has="gone", change_s=0.2), post("b", "", has="y", running=9, change_s=0.2)]
    assert decided(free, [demand("x"), demand("y")]) == {"a": "x", "b": "y"}


def test_an_odd_worker_does_not_wander_while_nobody_is_owed_anything() -> None:
    posts = [post("a", "x"), post("b", "x"), post("c", "y")]
    assert decided(posts, [demand("y"), demand("x")]) == {"a": "x", "b": "x", "c": "y"}


def test_a_worker_is_never_given_what_it_cannot_install() -> None:
    posts = [post("a", "x", unfit=frozenset("x")), post("b", "", unfit=frozenset("xy"))]
    assert decided(posts, [demand("x"), demand("y")]) == {"a": "y", "b": ""}


def test_a_run_that_no_worker_fits_holds_up_nobody() -> None:
    posts = [post(f"w{number}", "x", unfit=frozenset("z")) for number in range(4)]
    found = decided(posts, [demand("x"), demand("y"), demand("z", owed_s=50.0, weight=100.0)])
    assert Counter(found.values()) == {"x": 2, "y": 2}


def test_a_change_that_costs_more_than_the_work_that_waits_is_not_made_before_the_wait_has_cost_as_much() -> None:
    posts = [post("a", "x", architecture="one", change_s=0.1, restart_s=60.0)]
    little = demand("y", architecture="two", work_s=5.0)
    assert decided(posts, [little]) == {"a": "x"}
    assert decided(posts, [demand("y", architecture="two", work_s=500.0)]) == {"a": "y"}
    assert decided(posts, [demand("y", architecture="two", work_s=5.0, starved_s=61.0)]) == {"a": "y"}
    assert decided(posts, [demand("y", architecture="one", work_s=5.0)]) == {"a": "y"}


def test_a_worker_that_has_just_changed_over_stays_for_a_while() -> None:
    demands = [demand("x", owed_s=-50.0), demand("y", owed_s=50.0)]
    assert decided([post("a", "x", since=999.9, change_s=0.3)], demands) == {"a": "x"}
    assert decided([post("a", "x", since=990.0, change_s=0.3)], demands) == {"a": "y"}


@pytest.mark.parametrize("seed", range(200))
def test_with_nothing_owed_equal_runs_differ_by_two_workers_at_most_and_settle(seed: int) -> None:
    draw = random.Random(seed)
    runs = [f"r{number}" for number in range(draw.randint(1, 5))]
    posts = [
        post(f"w{number:02}", draw.choice(["", "gone", *runs]), running=draw.randint(0, 5))
        for number in range(draw.randint(1, 12))
    ]
    found = decided(posts, [demand(run_id) for run_id in runs])
    counts = Counter(dict.fromkeys(runs, 0))
    counts.update(found.values())
    assert set(found) == {one.session_id for one in posts}
    assert max(counts.values()) - min(counts.values()) <= 1
    settled = [post(name, run_id) for name, run_id in found.items()]
    assert decided(settled, [demand(run_id) for run_id in runs]) == found


# -- over time ---------------------------------------------------------------------------------------------------------


def test_three_runs_with_weights_one_one_two_get_such_shares_of_three_workers() -> None:
    world = fleet([demand("a"), demand("b"), demand("c", weight=2.0)], 3)
    tokens = world.run(60.0)
    assert shares(tokens) == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.5}, rel=0.05)
    assert sum(tokens.values()) > 0.95 * 60 * 300  # what changes cost


@pytest.mark.parametrize("change_s", [0.1, 3.0])
@pytest.mark.parametrize(("runs", "workers"), [(2, 1), (5, 1), (2, 3), (7, 4)])
def test_runs_of_one_weight_get_one_share_and_changes_cost_a_tenth_at_most(
    runs: int, workers: int, change_s: float
) -> None:
    world = fleet([demand(f"r{number}") for number in range(runs)], workers, change_s=change_s, step_s=change_s)
    turn = max(2.0, 10 * change_s)
    world.run(5 * turn)
    seconds = 10 * runs * turn
    tokens = world.run(seconds)
    assert min(tokens.values()) > 0.93 * sum(tokens.values()) / runs
    assert sum(tokens.values()) > 0.88 * seconds * workers * 100


def test_workers_of_unequal_speed_are_shared_by_the_tokens_that_they_make() -> None:
    workers = [Worker(rate=100.0), Worker(rate=20.0), Worker(rate=60.0)]
    world = Fleet([demand("a"), demand("b"), demand("c", weight=2.0)], workers)
    world.run(20.0)
    assert shares(world.run(120.0)) == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.5}, rel=0.07)


def test_a_floor_holds_under_overload_by_runs_of_more_weight_and_priority() -> None:
    others = [demand(f"o{number}", weight=10.0, priority=3) for number in range(5)]
    world = fleet([demand("low", floor=0.3, weight=0.01, priority=-5), *others], 3)
    world.run(20.0)
    found = shares(world.run(60.0))
    assert found["low"] > 0.28
    assert all(found[one.run_id] > 0.1 for one in others)


def test_a_ceiling_below_one_worker_is_kept_by_rest() -> None:
    world = fleet([demand("a", ceiling=0.5)], 3)
    world.run(10.0)
    assert sum(world.run(60.0).values()) == pytest.approx(0.5 * 3 * 100 * 60, rel=0.05)


def test_a_lower_priority_has_what_the_higher_leaves_and_no_more() -> None:
    busy = {"now": True}
    world = fleet(
        [demand("high", priority=1), demand("low")], 2, wants=lambda run, _: 9.0 if run == "low" or busy["now"] else 0.0
    )
    assert world.run(20.0)["low"] == 0
    busy["now"] = False
    assert world.run(20.0)["low"] > 0.9 * 20 * 200
    busy["now"] = True
    world.run(2.0)
    assert world.run(20.0)["low"] == 0


def test_no_run_of_a_class_starves_however_many_there_are() -> None:
    world = fleet([demand(f"r{number}", weight=1.0 if number else 50.0) for number in range(50)], 5)
    tokens = world.run(200.0)
    assert len(tokens) == 50
    assert min(tokens.values()) > 0.5 * sum(tokens.values()) / 99


def test_an_idle_run_claims_nothing_for_its_idle_time_when_it_comes_back() -> None:
    begin = 100.0
    world = fleet([demand("a"), demand("b")], 1, wants=lambda run, now: 9.0 if run == "a" or now > begin else 0.0)
    world.run(begin)
    assert world.changes == 0  # nobody else had work
    found = shares(world.run(20.0))
    assert found["a"] > 0.4


def test_a_run_with_little_work_at_a_time_does_not_keep_the_worker_from_others() -> None:
    """Its rollouts all run, none waits: it is charged for them all the same."""
    world = fleet([demand("few"), demand("many")], 1, wants=lambda run, _: 1.0 if run == "few" else 9.0)
    world.run(10.0)
    assert shares(world.run(60.0)) == pytest.approx({"few": 0.5, "many": 0.5}, rel=0.1)


def test_what_a_run_cannot_use_is_not_held_against_those_who_take_it() -> None:
    """A newcomer is not put before a run that had more than its share of what nobody else wanted."""
    late = 60.0

    def wants(run: str, now: float) -> float:
        return {"few": 0.1, "many": 9.0, "late": 9.0 if now > late else 0.0}[run]

    world = fleet([demand("few"), demand("many"), demand("late")], 4, wants=wants)
    world.run(late + 5.0)
    tokens = world.run(20.0)
    assert tokens["many"] > 0.8 * tokens["late"]


def test_a_run_that_pauses_between_steps_keeps_its_workers() -> None:
    world = fleet(
        [demand("a"), demand("b")], 2, change_s=2.0, wants=lambda run, now: 9.0 if run == "b" or now % 8 > 2 else 0.0
    )
    world.run(60.0)
    assert world.changes <= 3


def test_shares_that_whole_workers_fit_need_no_changes_at_all() -> None:
    world = fleet([demand("a"), demand("b"), demand("c", weight=2.0)], 8)
    world.run(60.0)
    assert world.changes == 0


def test_a_fleet_of_a_thousand_is_shared_as_a_small_one() -> None:
    runs = [demand(f"r{number}", weight=1.0 + number % 5) for number in range(50)]
    world = fleet(runs, 1000)
    world.step()
    held = Counter(one.run_id for one in world.workers)
    total = sum(one.weight for one in runs)
    for one in runs:
        assert abs(held[one.run_id] - 1000 * one.weight / total) <= 1.5
    world.step()
    assert world.changes == 0


def test_a_large_fleet_changes_over_in_several_decisions_and_none_changes_many() -> None:
    posts, demands, changes = [post(f"w{number:03}", "x") for number in range(600)], [demand("x"), demand("y")], []
    while True:
        found = decided(posts, demands)
        changes.append(sum(found[one.session_id] != one.run_id for one in posts))
        if not changes[-1]:
            break
        posts = [post(name, run_id) for name, run_id in found.items()]
    assert sum(changes) == 300
    assert max(changes) <= 128


def test_a_tail_keeps_no_worker_by_a_credit_that_it_cannot_use() -> None:
    posts = [post(f"w{number}", "tail" if number < 2 else "busy", running=1 + number // 2 * 7) for number in range(4)]
    demands = [demand("tail", wants=1.0, owed_s=3.4), demand("busy", owed_s=-3.4)]
    runs = list(decided(posts, demands).values())
    assert (runs.count("tail"), runs.count("busy")) == (1, 3)
    wants_more = [demand("tail", wants=4.0, owed_s=3.4), demand("busy", owed_s=-3.4)]
    assert list(decided(posts, wants_more).values()).count("tail") >= 2
