"""Machines come and go as traces, rates, notices and the seed say."""

from collections import Counter
from itertools import islice
from random import Random

import pytest
from msgspec.structs import replace

from ebbtide.simulator.scenario.input_tables import InputTables, SpotTrace, TraceEvent
from ebbtide.simulator.scenario.machine_events import MachineChange, MachineEvent, machine_events, machine_speed
from ebbtide.simulator.scenario.machine_pool import MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario, struck
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.types.ids import check_id

COMES, GONE, NOTICE, STALLS = MachineChange.COMES, MachineChange.GONE, MachineChange.NOTICE, MachineChange.STALLS
EVENTS = SpotTrace(
    events=tuple(
        TraceEvent(at_s, joins, node)
        for at_s, joins, node in [
            (0.0, True, "a"), (0.0, True, "b"), (10.0, True, "c"), (20.0, True, "d"), (60.0, False, "a"),
            (60.0, False, "b"), (60.0, True, "e"), (90.0, False, "c"), (120.0, True, "a"),
        ]
    )
)  # fmt: skip
COUNTS = SpotTrace(counts=((0.0, 3), (100.0, 0), (4000.0, 4), (4100.0, 1), (5000.0, 2)))
TABLES = InputTables(spots={"events.csv": EVENTS, "counts.csv": COUNTS})


def pool(**given: object) -> MachinePool:
    return replace(MachinePool(name="spot", kind="spot", engine="e"), **given)


def traced(file: str = "events.csv", **given: object) -> MachinePool:
    return pool(trace=replace(SpotTraceSpec(file=file), **given))


def events(
    one: MachinePool, *, hours: float = 1.0, seed: int = 0, more: tuple[MachinePool, ...] = ()
) -> list[MachineEvent]:
    run = (TrainingRun(name="r", trainer="t"),)
    scenario = Scenario(name="s", hours=hours, fleet=(one, *more), run=run, tables=TABLES)
    found = list(machine_events(scenario, one, seed))
    assert found == sorted(found)
    return found


def short(found: list[MachineEvent]) -> list[tuple[float, str, str]]:
    """First machines of their places by these alone, later ones with their number before it."""
    names = [event.machine.removeprefix("spot-").removeprefix("1.") for event in found]
    return [(event.at_s, event.change.name, name) for event, name in zip(found, names, strict=True)]


def sizes(found: list[MachineEvent]) -> dict[float, int]:
    """How many machines are there after each instant."""
    there, by_time = 0, {}
    for event in found:
        there += {COMES: 1, GONE: -1}.get(event.change, 0)
        by_time[event.at_s] = there
    return by_time


def test_a_fixed_pool_comes_at_once_and_stays() -> None:
    assert short(events(pool(workers=3))) == [(0.0, "COMES", name) for name in "012"]


def test_a_trace_is_replayed_with_losses_before_arrivals_of_the_same_instant() -> None:
    assert short(events(traced())) == [
        (0.0, "COMES", "a"), (0.0, "COMES", "b"), (10.0, "COMES", "c"), (20.0, "COMES", "d"), (60.0, "GONE", "a"),
        (60.0, "GONE", "b"), (60.0, "COMES", "e"), (90.0, "GONE", "c"), (120.0, "COMES", "2.a"),
    ]  # fmt: skip


def test_a_machine_that_comes_again_is_another_one() -> None:
    names = [event.machine for event in events(traced()) if event.change is COMES]
    assert len(names) == len(set(names))


def test_machines_of_different_pools_and_places_never_share_a_name() -> None:
    nodes = ("0", "1", "b-0", "2.0", "0.2", "again-1")
    twice = [(at_s, at_s % 2 == 0, node) for node in nodes for at_s in (0.0, 1.0, 2.0)]
    TABLES.spots["nodes.csv"] = SpotTrace(events=tuple(TraceEvent(*one) for one in sorted(twice)))
    names = [
        event.machine
        for name in ("a", "a-", "a-b", "a-1", "a-2", "a-again", "a-1-1")
        for event in events(replace(traced("nodes.csv"), name=name))
        if event.change is COMES
    ]
    assert len(names) == 7 * len(nodes) * 2
    assert len(set(names)) == len(names)
    assert all(check_id(name, field="worker_id") for name in names)


def test_counts_are_replayed_with_hours_of_no_machine() -> None:
    assert sizes(events(traced("counts.csv"), hours=2)) == {0.0: 3, 100.0: 0, 4000.0: 4, 4100.0: 1, 5000.0: 2}


def test_simultaneous_losses_stay_simultaneous_when_time_is_compressed() -> None:
    found = events(traced("counts.csv", time_scale=0.01))
    assert Counter(event.at_s for event in found if event.change is GONE) == {1.0: 3, 41.0: 3}


def test_a_window_begins_with_what_was_there() -> None:
    assert short(events(traced(start_s=60, span_s=45))) == [
        (0.0, "COMES", "c"), (0.0, "COMES", "d"), (0.0, "COMES", "e"), (30.0, "GONE", "c"),
    ]  # fmt: skip


def test_at_most_so_many_are_there_and_others_take_the_places_of_the_lost_at_once() -> None:
    assert short(events(traced(most=2))) == [
        (0.0, "COMES", "a"), (0.0, "COMES", "b"), (60.0, "GONE", "a"), (60.0, "GONE", "b"), (60.0, "COMES", "c"),
        (60.0, "COMES", "d"), (90.0, "GONE", "c"), (90.0, "COMES", "e"),
    ]  # fmt: skip


def test_a_share_keeps_machines_with_all_of_their_history() -> None:
    big = SpotTrace(events=tuple(TraceEvent(float(i), True, f"n{i}") for i in range(1000)))
    TABLES.spots["big.csv"] = big
    kept = [{event.machine for event in events(traced("big.csv", share=0.3, seed=seed))} for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2]
    assert 250 < len(kept[0]) < 350
    drawn = [{event.machine for event in events(traced("big.csv", share=0.3), seed=seed)} for seed in (1, 2)]
    assert drawn[0] == kept[0]
    assert drawn[1] == kept[2]


def test_a_repeated_window_begins_again_and_keeps_who_is_there_on_both_sides() -> None:
    found = short(events(traced(start_s=0, span_s=100, repeats=True), hours=250 / 3600))
    assert found[:8] == [
        (0.0, "COMES", "a"), (0.0, "COMES", "b"), (10.0, "COMES", "c"), (20.0, "COMES", "d"), (60.0, "GONE", "a"),
        (60.0, "GONE", "b"), (60.0, "COMES", "e"), (90.0, "GONE", "c"),
    ]  # fmt: skip
    assert found[8:12] == [(100.0, "GONE", "d"), (100.0, "GONE", "e"), (100.0, "COMES", "2.a"), (100.0, "COMES", "2.b")]
    stays = events(traced("counts.csv", start_s=4100, span_s=100, repeats=True))
    assert len(stays) == 1


def test_a_pool_is_there_from_its_first_moment_to_its_last_and_says_so_before() -> None:
    found = events(pool(workers=1, from_s=100.0, until_s=200.0, notice_s=30.0))
    assert short(found) == [(100.0, "COMES", "0"), (170.0, "NOTICE", "0"), (200.0, "GONE", "0")]
    assert found[1].for_s == 30.0


def test_random_losses_have_their_rate_and_another_machine_comes() -> None:
    found = events(pool(workers=200, losses_per_hour=0.5, replaced_s=120.0), hours=10)
    lost = [event for event in found if event.change is GONE]
    present_h = 200 * 10 - len(lost) * 120 / 3600
    assert len(lost) / present_h == pytest.approx(0.5, rel=0.1)
    assert min(sizes(found).values()) > 180
    came = {event.at_s for event in found if event.change is COMES}
    assert all(event.at_s + 120.0 in came for event in lost if event.at_s + 120.0 < 36_000)


def test_machines_that_are_not_replaced_become_fewer() -> None:
    found = events(pool(workers=50, losses_per_hour=1.0, replaced_s=None), hours=20)
    assert list(sizes(found).values())[-1] < 5
    assert sum(event.change is COMES for event in found) == 50


def test_random_losses_befall_machines_of_a_trace_while_they_are_there() -> None:
    found = events(pool(trace=SpotTraceSpec(file="counts.csv"), losses_per_hour=60.0, replaced_s=1.0), hours=2)
    assert not [event for event in found if 100.0 < event.at_s < 4000.0]
    assert sum(event.change is GONE for event in found) > 20


def test_so_many_losses_come_with_a_notice() -> None:
    found = events(pool(workers=300, losses_per_hour=1.0, notice_s=30.0, unannounced=0.25), hours=5)
    told = {event.machine: event for event in found if event.change is NOTICE}
    lost = {event.machine: event for event in found if event.change is GONE}
    assert len(told) / len(lost) == pytest.approx(0.75, abs=0.05)
    assert all(
        lost[name].at_s == pytest.approx(event.at_s + event.for_s) for name, event in told.items() if name in lost
    )
    assert {event.for_s <= 30.0 for event in told.values()} == {True}


def test_stalls_have_their_rate_and_never_overlap() -> None:
    found = [
        event
        for event in events(pool(workers=20, stalls_per_hour=2.0, stall_s=60.0), hours=10)
        if event.change is STALLS
    ]
    assert len(found) / (200 - len(found) / 60) == pytest.approx(2.0, rel=0.15)
    ends: dict[str, float] = {}
    for event in found:
        assert event.at_s >= ends.get(event.machine, 0.0)
        ends[event.machine] = event.at_s + event.for_s


def test_a_pools_draws_do_not_depend_on_other_pools() -> None:
    one, other = pool(workers=5, losses_per_hour=2.0), pool(name="other", workers=9, losses_per_hour=2.0)
    assert events(one, more=(other,)) == events(one)
    assert events(one, seed=1) != events(one)


def test_an_endless_scenario_costs_no_more_than_what_is_asked() -> None:
    scenario = Scenario(
        name="s",
        steps=1,
        fleet=(pool(workers=2_000, losses_per_hour=60.0),),
        run=(TrainingRun(name="r", trainer="t"),),
    )
    assert len(list(islice(machine_events(scenario, scenario.fleet[0], 0), 2_100))) == 2_100


def test_speeds_lie_within_their_spread_and_follow_the_seed() -> None:
    one = pool(speed_spread=0.2)
    speeds = [machine_speed(one, f"m{index}", 0) for index in range(500)]
    assert 0.8 <= min(speeds) < 0.82
    assert 1.18 < max(speeds) <= 1.2
    assert machine_speed(one, "m0", 0) == speeds[0] != machine_speed(one, "m0", 1)
    assert machine_speed(pool(), "m0", 0) == 1.0


def test_a_fault_strikes_machines_by_the_seed_in_whatever_order_they_are_named() -> None:
    fault = PlannedFault(kind="kill", at_s=100, machines=3)
    there = [f"m{index}" for index in range(6)]
    once = struck(fault, 0, there, 0)
    assert len(once) == 3
    assert struck(fault, 0, Random(5).sample(there, 6), 0) == once
    assert {tuple(struck(fault, index, there, 0)) for index in range(9)} != {tuple(once)}
    assert struck(fault, 0, there[:2], 0) == there[:2]
