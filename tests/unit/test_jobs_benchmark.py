"""The benchmark of jobs on the same devices: its traces, rivals, bounds and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.jobs.__main__ import FIGURES, calibration
from benchmarks.jobs.cost_bounds import fluid_bound, lp_bound
from benchmarks.jobs.decision_times import decision_times, successive
from benchmarks.jobs.job_traces import MIXES, TYPES, TraceEntry, as_jobs, mix, production, read_trace
from benchmarks.jobs.replays import MERGING, Replays, colocated, pooled, replay, terms
from benchmarks.rivals.rollmux_policy import RollMuxPolicy, fifo_slowdowns
from ebbtide.coordinator.rules.phase_turns import NO_MERGING
from ebbtide.coordinator.rules.run_groups import Forecast, GroupPlanner, Move, RunGroup
from ebbtide.simulator.shared_devices import TurnsPolicy


def test_the_drawn_trace_has_the_published_statistics() -> None:
    trace = production(0)
    stays = np.array([one.leave_h - one.arrive_h for one in trace])
    assert stays.mean() == pytest.approx(27.95, rel=0.01)
    assert np.quantile(stays, [0.1, 0.5, 0.9]) == pytest.approx([6.2, 20.5, 56.9], rel=0.15)
    assert trace[-1].arrive_h == pytest.approx(238.0)
    assert sum(one.type == "7B-8k" for one in trace) == 100
    assert all(1.0 <= one.slowdown <= 2.0 for one in trace)


def test_a_trace_of_ones_own_is_read_and_what_is_wrong_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    head = "job,arrive_h,leave_h,type,slowdown\n"
    path.write_text(head + "b,2,3.5,7B-8k,1.5\na,0,1,32B-8k,1\n")
    assert [one.name for one in read_trace(path)] == ["a", "b"]
    for line in ("a,0,1,9B-8k,1.5", "a,2,1,7B-8k,1.5", "a,0,1,7B-8k,0.9", "a,0,x,7B-8k,1.5", "a,0,1,7B-8k"):
        path.write_text(head + line + "\n")
        with pytest.raises(ValueError, match="line 2"):
            read_trace(path)
    path.write_text(head + "a,0,1,7B-8k,1.5\n" * 2)
    with pytest.raises(ValueError, match="name of its own"):
        read_trace(path)


def test_times_that_vary_are_the_same_for_every_policy_and_drift_either_way() -> None:
    trace = production(0, 40)
    jobs = as_jobs(trace, noise=True)
    assert jobs == as_jobs(trace, noise=True)
    later = [np.mean(one.rollouts[-20:]) / one.expected_rollout_s for one in jobs if len(one.rollouts) > 150]
    assert min(later) < 0.85
    assert max(later) > 1.15


@pytest.mark.parametrize("kind", MIXES)
def test_no_policy_is_cheaper_than_the_bounds_and_the_program_is_no_weaker_than_the_fluid(kind: str) -> None:
    jobs = as_jobs(mix(kind, 1, 8))
    under = terms(MERGING)
    bounds = fluid_bound(jobs, under), lp_bound(jobs, under)
    assert bounds[0] <= bounds[1] * (1 + 1e-9)
    assert min(replay(name, jobs, under).price for name in ("rollmux", "ebbtide")) >= bounds[1]


def test_the_program_knows_that_a_group_of_one_kind_of_run_leaves_a_node_idle() -> None:
    """Rollouts take half as long again as training, so one unit is too few, and two are too many."""
    jobs = as_jobs([TraceEntry(str(at), 0.0, 10.0, "", 2.0, (150.0, 100.0)) for at in range(4)])
    under = terms()
    hours = sum(sum(one.trains) for one in jobs) / 3600
    one_unit, two_units = 1.5 * (42.24 + 14.80), 42.24 + 2 * 14.80
    assert lp_bound(jobs, under) == pytest.approx(min(one_unit, two_units) * hours, rel=0.01)
    assert fluid_bound(jobs, under) == pytest.approx((42.24 + 1.5 * 14.80) * hours)


def test_fifo_queues_let_short_rounds_run_between_long_ones_and_share_a_node_evenly() -> None:
    own_nodes = fifo_slowdowns([(250, 100, 0, 0), (250, 100, 0, 0), (600, 100, 0, 0)], [0, 1, 2])
    assert max(own_nodes) < 1.15
    assert fifo_slowdowns([(134, 113, 1, 4)] * 2, [0, 0]) == pytest.approx([2 * 135 / 247] * 2, rel=0.01)


def test_rollmux_plans_with_the_tails_that_it_will_move_away() -> None:
    """Two equal rollouts and no training worth the name: a unit is occupied for 0.8125 of each, and takes as long."""
    pair = [(100.0, 1.0, 0.0, 0.0)] * 2
    assert fifo_slowdowns(pair, [0, 0], MERGING) == pytest.approx([2 * 81.25 / 101] * 2, rel=0.01)
    jobs = as_jobs([TraceEntry(str(at), 0.0, 10.0, "", 1.8, (100.0, 1.0)) for at in range(2)])
    for merging, units in ((NO_MERGING, (0, 1)), (MERGING, (0,))):
        policy = RollMuxPolicy(terms(merging), merging=merging, prunes=False)
        first = policy.arrived(jobs[0], {})
        assert policy.arrived(jobs[1], {first.name: first}).units == units


def test_decisions_are_timed_on_forecasts_that_drift_with_as_many_runs_at_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.jobs.decision_times._RUNS", 12)
    jobs = successive(12.0)
    for hour in np.arange(0.05, 12.0, 0.25):
        assert sum(one.arrive_s <= hour * 3600.0 < one.leave_s for one in jobs) == 12
    assert len(jobs) > 12
    played = 0
    made = GroupPlanner._forecast

    def counted(*known: Any) -> Forecast:
        nonlocal played
        played += 1
        return made(*known)

    monkeypatch.setattr(GroupPlanner, "_forecast", counted)
    counts: list[int] = []
    reviewed = TurnsPolicy.review

    def review(self: TurnsPolicy, groups: Mapping[str, RunGroup], left: Sequence[str]) -> list[Move]:
        before = played
        found = reviewed(self, groups, left)
        counts.append(played - before)
        return found

    monkeypatch.setattr(TurnsPolicy, "review", review)
    found = decision_times(12.0)
    assert found["reviews"] == len(counts) >= 40
    assert sum(one > 0 for one in counts) > len(counts) / 2  # these were not answered from memory
    assert 0.0 < found["processor_review_p50_ms"] <= found["processor_review_p99_ms"]


def test_rivals_do_the_same_rounds_and_pay_for_them() -> None:
    trace = production(1, 12)
    jobs = as_jobs(trace)
    rounds = sum(len(one.rollouts) for one in jobs)
    found = [
        replay("rollmux", jobs, terms()),
        colocated(trace, jobs),
        pooled(trace, jobs, 0.8),
        pooled(trace, jobs, 1.0),
    ]
    assert [one.rounds for one in found] == [rounds] * 4
    assert all(one.price > 0.0 for one in found)
    assert found[2].slowdown > found[3].slowdown


def test_a_replay_that_was_kept_is_not_made_again_and_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    jobs = as_jobs(mix("balanced", 0, 4))
    replays = Replays(tmp_path)
    first = replays.replay("rollmux", jobs, terms())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(msgspec.json.encode(replace(first, missed=99)))
    assert Replays(tmp_path).replay("rollmux", jobs, terms()).missed == 99
    for name, some, under in (
        ("alone", jobs, terms()),
        ("rollmux", jobs[1:], terms()),
        ("rollmux", jobs, terms(MERGING)),
    ):
        assert replays.replay(name, some, under).missed != 99


def test_alone_and_colocated_are_as_published() -> None:
    """On the whole trace, since only its figures are published: five seconds."""
    found = calibration(production(0))
    assert found["alone_per_hour_error"] < 0.05
    assert max(found["colocated_per_hour_error"], found["colocated_pair_error"]) < 0.10


def test_the_pair_of_the_tables_has_its_published_types_and_the_file_all_figures() -> None:
    assert TYPES["7B-8k"].alone_s == 247
    assert len(FIGURES) == len(set(FIGURES)) == 9
