"""Which run a worker serves, in virtual time."""

import pytest

from ebbtide.coordinator.state.attempt_records import new_entry
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from tests.unit.coordinator.virtual_fleet import VERSION, VirtualFleet


@pytest.mark.parametrize(("length", "least_s", "most_s"), [(8, 0.0, 3.0), (9_000, 14.0, 17.0)])
def test_a_worker_changes_runs_only_if_that_is_worth_reading_its_rollouts_elsewhere(
    length: int, least_s: float, most_s: float
) -> None:
    fleet = VirtualFleet()
    workers = [fleet.attach("w1"), fleet.attach("w2")]
    submit(fleet, "r", length)
    fleet.round()
    assert all(len(worker.attempts) == 4 for worker in workers)
    for attempt in list(fleet.run.running.values()):
        attempt.begin(fleet.now)
    fleet.beat(*workers)
    fleet.round(0.3)
    spec = RunSpec(name="s", model="m", environment=EnvironmentSpec(name="e"))
    other = fleet.state.add_run("s", spec)
    with other.rereading():
        other.note_reconciled()
    other.announce(VERSION)
    submit(fleet, "s", length)
    while workers[0].run_id == workers[1].run_id:
        fleet.round()
        assert fleet.now < most_s
    # Four rollouts of 9,000 tokens are read in 7.2 s: a worker stays twice as long.
    assert fleet.now > least_s


def submit(fleet: VirtualFleet, run_id: str, length: int) -> None:
    for number in range(8):
        request = RolloutRequest(
            rollout_id=f"{run_id}{number}",
            group_id="g",
            episode_id=f"{run_id}{number}",
            prompt_ids=b"",
            sampling=Sampling(max_tokens=64),
            kind=RolloutKind.TRAIN,
        )
        fleet.state.runs[run_id].admit(new_entry(request, place=number, group=0, length=length, now=fleet.now))
