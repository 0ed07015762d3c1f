"""Lists that are longer than a message, and how many runs a user may have."""

from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.types.run import EnvironmentSpec
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, runs_pb2
from tests.integration.coordinator.conftest import TOKEN

LARGE = {"environment": EnvironmentSpec(name="e", params={"x": "x" * 31_000})}


async def test_more_runs_than_a_message_holds_are_listed_page_by_page(cluster_with: Any) -> None:
    async with cluster_with(max_runs_per_user=1000) as cluster:
        names = [f"r{number}" for number in range(140)]
        for name in names:
            await cluster.run(name, version=False, **LARGE)
        async with Client(cluster.server.address, security=ClientSecurity(token=TOKEN)) as client:
            assert [run.run_id for run in await client.runs()] == names
        former = await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())
        listed = [run.run_id for run in former.runs]
        assert listed == names[-len(listed) :], "who asks for no page gets the newest"
        assert 50 < len(listed) < 140


async def test_a_page_has_no_more_entries_than_asked_for_and_names_the_next(cluster: Any) -> None:
    for name in ("c", "a", "b"):
        await cluster.run(name, version=False)
        await cluster.worker(f"w-{name}")
    runs = runs_pb2.ListRunsRequest(page_size=2)
    first = await cluster.call(cluster.runs.ListRuns, runs)
    assert ([run.run_id for run in first.runs], bool(first.next)) == (["c", "a"], True)
    runs.cursor = first.next
    last = await cluster.call(cluster.runs.ListRuns, runs)
    assert ([run.run_id for run in last.runs], last.next) == (["b"], "")
    stub = fleet_pb2_grpc.FleetStub(cluster.channel)
    workers = fleet_pb2.ListWorkersRequest(page_size=2)
    first = await cluster.call(stub.ListWorkers, workers)
    assert [worker.worker_id for worker in first.workers] == ["w-a", "w-b"]
    workers.cursor = first.next
    last = await cluster.call(stub.ListWorkers, workers)
    assert ([worker.worker_id for worker in last.workers], last.next) == (["w-c"], "")
    with pytest.raises(InvalidRequest, match="cursor: is none that was given out"):
        await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest(page_size=1, cursor="x"))


async def test_a_user_has_no_more_live_runs_than_allowed(cluster_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = ["ann"]
    monkeypatch.setattr("ebbtide.coordinator.api.runs.caller_name", lambda: caller[0], raising=False)
    async with cluster_with(max_runs_per_user=2) as cluster:
        first = await cluster.run("a1", version=False)
        await cluster.run("a2", version=False)
        assert (await first.get()).submitter == "ann"
        await cluster.restart()  # who submitted them is known from the store
        limit = "user ann has 2 live runs, as many as max_runs_per_user of the coordinator allows; end one"
        with pytest.raises(NoCapacity, match=limit):
            await cluster.run("a3", version=False)
        await cluster.run("a2", version=False)  # a repeat is no new one
        caller[0] = "bob"
        await cluster.run("b1", version=False)
        caller[0] = "ann"
        await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="a1"))
        await cluster.run("a3", version=False)
