"""Which run a worker serves, in virtual time."""

from collections import Counter

import pytest

from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.state.worker_reports import InstalledReport, ReleasedReport
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import EnvironmentSpec, RunSpec
from tests.unit.coordinator.virtual_fleet import VERSION, VirtualFleet


@pytest.mark.parametrize(("length", "least_s", "most_s"), [(8, 0.0, 3.0), (9_000, 14.0, 17.0)])
def test_a_worker_changes_runs_only_if_that_is_worth_reading_its_rollouts_elsewhere(
    length: int, least_s: float, most_s: float
) -> None:
    fleet = VirtualFleet()
    workers = [fleet.attach("w1"), fleet.attach("w2")]
    fleet.submit(8, run_id="r", length=length)
    fleet.round()
    assert all(len(worker.attempts) == 4 for worker in workers)
    for attempt in list(fleet.run.running.values()):
        attempt.begin(fleet.now)
    fleet.beat(*workers)
    fleet.round(0.3)
    add_run(fleet, "s")
    fleet.submit(8, run_id="s", length=length)
    while workers[0].run_id == workers[1].run_id:
        fleet.round()
        assert fleet.now < most_s
    # Four rollouts of 9,000 tokens are read in 7.2 s: a worker stays twice as long.
    assert fleet.now > least_s


def test_a_run_takes_no_more_workers_while_its_own_wait_for_the_coordinator() -> None:
    fleet = VirtualFleet(timeslice_s=5.0)
    workers = [fleet.attach(f"w{number}") for number in range(4)]
    add_run(fleet, "s")
    fleet.submit(32, run_id="r", length=8)
    fleet.submit(32, run_id="s", length=8)
    fleet.unfilled.add("s")
    fleet.state.shed(Work.STARTS)
    served = []
    for _ in range(600):
        fleet.round()
        for worker in workers:
            if asked := tuple(one.ref for one in worker.attempts.values() if one.attempt_id in worker.freed):
                fleet.registry.hear(worker, ReleasedReport(attempts=asked, cause=EndCause.MOVED))
            if worker.run_id == "s" and not worker.version_of("s"):
                fleet.registry.hear(worker, InstalledReport(version=VERSION, run_id="s"))
        for attempt in list(fleet.run.running.values()):
            attempt.begin(fleet.now)
            fleet.run.accept_tokens([attempt], [attempt.stored + 1])
        served.append(sum(worker.run_id == "s" for worker in workers))
    assert max(served) == 2, "the tokens that it lacks are not for want of workers"
    assert served[-1] == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_two_runs_take_turns_at_an_odd_worker_however_long_its_rollouts_take_to_read(workers: int) -> None:
    fleet = VirtualFleet(timeslice_s=2.0)
    sessions = [fleet.attach(f"w{number}") for number in range(workers)]
    add_run(fleet, "s")
    for run_id in ("r", "s"):
        fleet.submit(32, run_id=run_id, length=9_000)
    fleet.round()
    served = Counter[str]()
    for _ in range(4_000):
        fleet.round(0.25)
        for session in sessions:
            if asked := tuple(one.ref for one in session.attempts.values() if one.attempt_id in session.freed):
                fleet.registry.hear(session, ReleasedReport(attempts=asked, cause=EndCause.MOVED))
            if not session.version_of(session.run_id):
                fleet.registry.hear(session, InstalledReport(version=VERSION, run_id=session.run_id))
            for attempt in list(session.pending.values()):
                attempt.begin(fleet.now)
            for attempt in session.attempts.values():
                attempt.run.accept_tokens([attempt], [attempt.stored + 1])
            session.append_stream.tokens_came(fleet.now)
            served[session.run_id] += 1
        fleet.beat(*sessions)
    assert min(served["r"], served["s"]) > 0.4 * sum(served.values())


def add_run(fleet: VirtualFleet, run_id: str) -> None:
    spec = RunSpec(name=run_id, model="m", environment=EnvironmentSpec(name="e"))
    run = fleet.state.add_run(run_id, spec)
    with run.mirror.rereading():
        run.mirror.note_reconciled()
    run.versions.announce(VERSION)
