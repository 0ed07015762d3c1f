"""The simulation of runs on the same devices: what is paid, what rounds take, and that live decisions keep bounds."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest

from benchmarks.jobs.job_traces import as_jobs, mix, production
from benchmarks.jobs.replays import AlonePolicy, replay, terms, told
from ebbtide.coordinator.rules.phase_turns import Returning, Waiter
from ebbtide.coordinator.rules.run_groups import RunGroup, Seat
from ebbtide.simulator.shared_devices import Job, SharedDevices, TurnsPolicy

PRICE = 14.80 + 42.24


def job(name: str, rounds: int = 10, **more: Any) -> Job:
    known = {
        "arrive_s": 0.0,
        "max_slowdown": 2.0,
        "rollout_switch_s": 1.0,
        "train_switch_s": 4.0,
        "cold_s": 60.0,
    } | more
    return Job(
        name=name,
        rollouts=(134.0,) * rounds,
        trains=(113.0,) * rounds,
        expected_rollout_s=134.0,
        expected_train_s=113.0,
        **known,
    )


class OneGroup(AlonePolicy):
    """All in one group, on one unit, in the order in which they come."""

    def arrived(self, job: Job, groups: Mapping[str, RunGroup]) -> RunGroup:
        seats = groups["g"].seats if "g" in groups else ()
        return RunGroup("g", 1, (0,), (*seats, Seat(job.name, 0)))

    def turn(self, waiters: Sequence[Waiter], returning: Sequence[Returning]) -> int:
        return max(range(len(waiters)), key=lambda at: (waiters[at].waited, -at))


def test_a_job_alone_takes_its_time_and_pays_for_its_nodes() -> None:
    outcome = SharedDevices([job("a")], AlonePolicy(), terms()).run()
    end = outcome.ends["a"]
    assert end.took_s == end.alone_s == pytest.approx(60.0 + 2470.0)
    assert outcome.price == pytest.approx(PRICE * end.took_s / 3600)


def test_two_jobs_in_turns_take_what_their_unit_needs_for_both_with_switches() -> None:
    outcome = SharedDevices([job("a", 50), job("b", 50)], OneGroup(), terms()).run()
    cycle = 2 * 134.0 + 2 * 1.0
    assert outcome.finished_s == pytest.approx(60.0 + 50 * cycle, rel=0.02)
    assert outcome.price == pytest.approx(PRICE * outcome.finished_s / 3600)


def test_a_job_that_leaves_by_the_clock_gives_its_devices_back() -> None:
    outcome = SharedDevices([job("a", leave_s=700.0), job("b", 20)], OneGroup(), terms()).run()
    assert outcome.ends["a"].took_s == pytest.approx(700.0)
    assert outcome.ends["b"].rounds == 20


@pytest.mark.parametrize("noise", [False, True])
def test_under_the_live_decisions_all_work_is_done_within_all_bounds_for_less(noise: bool) -> None:
    """Jobs of hours, since nobody moves in less: two seconds."""
    jobs = as_jobs(production(3, 9), noise=noise)
    found = {name: replay(name, jobs, terms()) for name in ("alone", "ebbtide")}
    assert found["ebbtide"].rounds == found["alone"].rounds == sum(len(one.rollouts) for one in jobs)
    assert found["ebbtide"].missed == 0
    assert found["ebbtide"].price < 0.95 * found["alone"].price
    assert found["ebbtide"].moves > 0


def test_a_simulation_repeats_itself() -> None:
    jobs = as_jobs(mix("mixed", 0, 8), noise=True)
    first, second = (told(SharedDevices(jobs, TurnsPolicy(terms()), terms()).run(), jobs) for _ in range(2))
    assert first == second


def test_without_reviews_nobody_moves() -> None:
    jobs = as_jobs(mix("balanced", 0, 15))
    outcome = SharedDevices(jobs, TurnsPolicy(terms(), review_every_s=inf), terms()).run()
    assert told(outcome, jobs).moves == 0
