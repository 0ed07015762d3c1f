"""Laws of which runs share devices: memory, prices, bounds, reasons, moves, and how far from the best grouping."""

import random
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.coordinator.rules.phase_turns import PhaseForecast
from ebbtide.coordinator.rules.run_groups import (
    Free,
    GroupPlanner,
    Move,
    NotSeated,
    Reason,
    RunGroup,
    Seat,
    Seated,
    SharingRun,
    Terms,
    Wish,
    group_price,
    resident_bytes,
    without,
)

TERMS = Terms(rollout_price=15.0, train_price=42.0, rollout_memory=1_000, train_memory=1_000)


def run(name: str, rollout: float = 134.0, train: float = 113.0, bound: float = 1.6, **more: Any) -> SharingRun:
    known = {"rollout_bytes": 250, "train_bytes": 200, "cold_s": 60.0} | more
    return SharingRun(
        run_id=name,
        rollout=PhaseForecast.of(rollout),
        train=PhaseForecast.of(train),
        max_slowdown=bound,
        **known,
    )


def drawn(draw: random.Random, name: str) -> SharingRun:
    rollout, train = draw.uniform(50, 600), draw.uniform(50, 300)
    return run(
        name, rollout, train, draw.uniform(1, 2), rollout_bytes=draw.randint(50, 490), train_bytes=draw.randint(50, 520)
    )


class Cluster:
    """Groups that follow the planner's decisions."""

    def __init__(self, terms: Terms = TERMS) -> None:
        self.planner, self.names = GroupPlanner(terms), 0
        self.groups: dict[str, RunGroup] = {}
        self.runs: dict[str, SharingRun] = {}

    def comes(self, one: SharingRun, **more: Any) -> Seated | NotSeated:
        self.names += 1
        found = self.planner.seat(one, self.groups.values(), self.runs, new_name=f"g{self.names}", **more)
        if isinstance(found, Seated):
            self.runs[one.run_id] = one
            self.groups[found.group.name] = found.group
        return found

    def leaves(self, name: str) -> None:
        (group,) = (one for one in self.groups.values() if any(seat.run_id == name for seat in one.seats))
        self.replaced(group.name, without(group, name))
        del self.runs[name]

    def replaced(self, name: str, group: RunGroup | None) -> None:
        if group is None:
            del self.groups[name]
        else:
            self.groups[name] = group

    def reviewed(self, name: str) -> list[Move]:
        self.names += 1
        moves = self.planner.review(self.groups[name], self.groups.values(), self.runs, new_name=f"g{self.names}")
        for move in moves:
            self.replaced(name, without(self.groups[name], move.seated.seat.run_id))
            self.groups[move.seated.group.name] = move.seated.group
        return moves

    @property
    def price(self) -> float:
        return sum(group_price(group, self.planner.terms) for group in self.groups.values())

    @property
    def work(self) -> float:
        return sum(self.planner.forecast(group, self.runs).work for group in self.groups.values())


# -- a seat ------------------------------------------------------------------------------------------------------------


def test_the_second_run_fills_what_the_first_leaves_idle() -> None:
    cluster = Cluster()
    assert isinstance(first := cluster.comes(run("a")), Seated)
    assert isinstance(second := cluster.comes(run("b")), Seated)
    assert (first.reason, second.reason) == (Reason.ALONE, Reason.FILLS_IDLE)
    assert second.group.name == first.group.name
    assert second.added_price < first.added_price


def test_a_run_without_room_for_delay_and_one_that_wants_its_own_devices_are_alone() -> None:
    cluster = Cluster()
    for name in "ab":
        cluster.comes(run(name, bound=1.0, train_switch_s=4.0))
    for name in "cd":
        cluster.comes(run(name, shares=False))
    assert len(cluster.groups) == 4


def test_a_run_that_joins_breaks_nobodys_bound() -> None:
    cluster = Cluster()
    for number, bound in enumerate((1.05, 1.2, 1.9, 1.9, 1.9, 1.9)):
        cluster.comes(run(f"r{number}", bound=bound))
    for group in cluster.groups.values():
        assert cluster.planner.at_risk(group, cluster.runs) is None
        found = cluster.planner.forecast(group, cluster.runs)
        for seat, slowdown in zip(group.seats, found.slowdowns, strict=True):
            assert slowdown <= cluster.runs[seat.run_id].max_slowdown


def test_what_is_known_badly_keeps_a_distance_from_bounds() -> None:
    """Two runs that just keep their bounds are not put together while their times are guesses."""
    group = RunGroup("g", 1, (0,), (Seat("a", 0), Seat("b", 0)))
    known = {name: run(name, 200.0, 100.0, 1.36) for name in "ab"}
    guess = PhaseForecast.of(200.0, error=0.3), PhaseForecast.of(100.0, error=0.3)
    guessed = {name: replace(one, rollout=guess[0], train=guess[1]) for name, one in known.items()}
    assert GroupPlanner(TERMS).at_risk(group, known) is None
    assert GroupPlanner(TERMS).at_risk(group, guessed) is not None


def test_wide_and_narrow_runs_do_not_meet() -> None:
    cluster = Cluster()
    cluster.comes(run("a", width=2))
    cluster.comes(run("b"))
    assert sorted(group.width for group in cluster.groups.values()) == [1, 2]


# -- what cannot be seated ---------------------------------------------------------------------------------------------


def test_without_nodes_a_run_is_queued_or_refused_by_its_wish_with_the_numbers() -> None:
    for wish, queued in ((Wish.QUEUE, True), (Wish.REFUSE, False)):
        found = Cluster().comes(run("a", width=2), free=Free(rollout_nodes=4, train_nodes=1), wish=wish)
        assert found == NotSeated(queued=queued, reason=Reason.NO_NODES, needed=2, there=1)


def test_a_state_that_fits_nowhere_is_told_in_bytes() -> None:
    found = Cluster().comes(run("a", train_bytes=1_200))
    assert found == NotSeated(queued=True, reason=Reason.MEMORY, needed=1_200, there=1_000)


def test_where_only_a_shared_place_is_left_the_bound_that_it_would_break_is_named() -> None:
    cluster = Cluster()
    cluster.comes(run("a", bound=1.0))
    found = cluster.comes(run("b", bound=3.0), free=Free(0, 0))
    assert isinstance(found, NotSeated)
    assert found.reason in {Reason.BOUND, Reason.OTHERS_BOUND}
    assert found.needed > found.there


# -- over time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_no_memory_is_exceeded_no_run_is_lost_and_added_prices_are_those_of_the_nodes(seed: int) -> None:
    draw, cluster = random.Random(seed), Cluster()
    for number in range(60):
        before = cluster.price
        found = cluster.comes(drawn(draw, f"r{number}"))
        assert isinstance(found, Seated), "nodes are not limited"
        assert cluster.price - before == pytest.approx(found.added_price)
        if number % 3 == 2:
            cluster.leaves(draw.choice(sorted(cluster.runs)))
        if number % 5 == 4:
            cluster.reviewed(draw.choice(sorted(cluster.groups)))
        seated = [seat.run_id for group in cluster.groups.values() for seat in group.seats]
        assert sorted(seated) == sorted(cluster.runs)
        for group in cluster.groups.values():
            assert max(resident_bytes(group, cluster.runs)) <= 1_000
            assert {seat.unit for seat in group.seats} == set(group.units)


def test_after_departures_a_run_moves_where_that_saves_its_switch_and_stays_where_it_does_not() -> None:
    for cold_s, moved in ((60.0, True), (90_000.0, False)):
        cluster = Cluster()
        cluster.comes(run("a", bound=inf, cold_s=cold_s))
        left = RunGroup("lone", 1, (0,), (Seat("b", 0),))
        cluster.runs["b"] = run("b", bound=inf, cold_s=cold_s)
        cluster.groups["lone"] = left
        moves = cluster.reviewed("lone")
        assert bool(moves) == moved
        assert ("lone" in cluster.groups) == (not moved)
        for move in moves:
            assert move.reason == Reason.CHEAPER
            assert move.saved_price * TERMS.horizon_s / 3600 > move.switch_price > 0


def test_runs_whose_rollout_nodes_failed_are_seated_again_and_those_on_others_stay() -> None:
    cluster = Cluster()
    for number in range(6):
        cluster.comes(run(f"r{number}"))
    (group, *_) = (one for one in cluster.groups.values() if len(one.units) > 1)
    failed = {seat.run_id for seat in group.seats if seat.unit == group.units[0]}
    kept = {seat for one in cluster.groups.values() for seat in one.seats if seat.run_id not in failed}
    lost = [cluster.runs[name] for name in sorted(failed)]
    for one in lost:
        cluster.leaves(one.run_id)
    for one in lost:
        assert isinstance(cluster.comes(one), Seated)
    seated = [seat for one in cluster.groups.values() for seat in one.seats]
    assert sorted(seat.run_id for seat in seated) == [f"r{number}" for number in range(6)]
    assert kept <= set(seated)


def test_a_group_whose_bounds_have_drifted_away_lets_one_go_and_keeps_them_again() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.comes(run(name, 134.0, 60.0, 1.3))
    (name,) = (name for name, group in cluster.groups.items() if len(group.seats) > 1)
    cluster.runs = {one.run_id: replace(one, train=PhaseForecast.of(180.0)) for one in cluster.runs.values()}
    assert cluster.planner.at_risk(cluster.groups[name], cluster.runs) is not None
    (move,) = cluster.reviewed(name)
    assert move.reason == Reason.BOUND_AT_RISK
    assert cluster.planner.at_risk(cluster.groups[name], cluster.runs) is None


def test_a_run_that_is_behind_its_bound_must_catch_up_and_one_ahead_may_not_for_long() -> None:
    planner, runs = GroupPlanner(TERMS), {name: run(name, bound=1.45) for name in "abc"}
    group = RunGroup("g", 1, (0, 1, 2), tuple(Seat(name, at) for at, name in enumerate("abc")))
    assert planner.at_risk(group, runs) is None, "three times 113 s of 247 s are 1.37"
    behind = runs | {"b": replace(runs["b"], alone_s=50_000.0, took_s=1.45 * 55_000.0)}
    assert planner.at_risk(group, behind) is not None
    later = runs | {"b": replace(runs["b"], alone_s=50_000.0, took_s=1.45 * 49_999.0)}
    assert planner.at_risk(group, later) is None


# -- the best grouping -------------------------------------------------------------------------------------------------


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for at, block in enumerate(smaller):
            yield [*smaller[:at], [items[0], *block], *smaller[at + 1 :]]


def cheapest_group(names: Sequence[str], cluster: Cluster) -> float:
    """The least score of one group with all of these, over all ways to share rollout units."""
    best = inf
    for units in partitions(names):
        seats = tuple(Seat(name, at) for at, block in enumerate(units) for name in block)
        group = RunGroup("g", 1, tuple(range(len(units))), seats)
        if max(resident_bytes(group, cluster.runs)) <= 1_000 and cluster.planner.at_risk(group, cluster.runs) is None:
            work = cluster.planner.forecast(group, cluster.runs).work
            best = min(best, group_price(group, TERMS) - TERMS.worth * work)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_and_reviews_come_near_the_best_of_all_groupings(seed: int) -> None:
    """Of five runs, by what is paid beyond the price of the work that gets done."""
    draw, cluster = random.Random(seed), Cluster()
    for number in range(5):
        cluster.comes(drawn(draw, f"r{number}"))
    for _ in range(3):
        for name in sorted(cluster.groups):
            if name in cluster.groups:
                cluster.reviewed(name)
    kept: dict[tuple[str, ...], float] = {}
    best = inf
    for blocks in partitions(sorted(cluster.runs)):
        for block in blocks:
            if tuple(block) not in kept:
                kept[tuple(block)] = cheapest_group(block, cluster)
        best = min(best, sum(kept[tuple(block)] for block in blocks))
    alone = sum(kept[(name,)] for name in cluster.runs)
    reached = cluster.price - TERMS.worth * cluster.work
    assert reached >= best - 1e-6
    assert alone - reached >= 0.75 * (alone - best), "three quarters of what sharing can save at most"
