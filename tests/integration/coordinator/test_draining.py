"""A worker that is asked to leave."""

import math
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.types.fleet import WorkerState
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.waiting import wait_until


async def drain(cluster: Any, worker_id: str, within_s: float) -> int:
    stub = fleet_pb2_grpc.FleetStub(cluster.channel)
    request = fleet_pb2.DrainWorkerRequest(worker_id=worker_id, within_s=within_s)
    return int((await cluster.call(stub.DrainWorker, request)).running)


async def test_a_worker_that_is_to_leave_is_told_and_given_nothing_more(cluster: Any) -> None:
    run, leaving = await cluster.run(), await cluster.worker("w1", slots=2)
    await run.submit("a")
    await leaving.has("a")
    assert await drain(cluster, "w1", 30.0) == 1
    await wait_until(lambda: leaving.drains == [30.0], what="the worker is told")
    await run.submit("b")
    other = await cluster.worker("w2")
    await other.has("b")
    assert set(leaving.assigned) == {"a"}
    listed = {worker.worker_id: worker for worker in cluster.coordinator.fleet.workers()}
    assert (listed["w1"].state, listed["w1"].reason) == (WorkerState.DRAINING, "asked to leave")


async def test_a_nearer_deadline_is_told_again(cluster: Any) -> None:
    leaving = await cluster.worker("w1")
    assert [await drain(cluster, "w1", within_s) for within_s in (30.0, 5.0)] == [0, 0]
    await wait_until(lambda: leaving.drains == [30.0, 5.0], what="the worker is told both")


async def test_an_unknown_worker_cannot_be_drained(cluster: Any) -> None:
    with pytest.raises(NotFound, match="no worker w9"):
        await drain(cluster, "w9", 1.0)


@pytest.mark.parametrize("within_s", [-1.0, 0.0, math.inf, math.nan])
async def test_a_worker_is_given_some_time_to_leave(cluster: Any, within_s: float) -> None:
    leaving = await cluster.worker("w1")
    with pytest.raises(InvalidRequest) as refused:
        await drain(cluster, "w1", within_s)
    assert refused.value.field == "within_s"
    assert leaving.drains == []


async def test_the_run_is_told_why_a_worker_drains(cluster: Any) -> None:
    run, leaving = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await leaving.has("a")
    await leaving.say(draining=fleet_pb2.Draining(deadline_s=20.0, reason="spot interruption"))
    (event,) = [e for e in await run.events("worker", 2) if e.labels["state"] == "draining"]
    assert "spot interruption" in event.message
    assert event.values["deadline"] == 20.0


async def test_a_worker_may_leave_at_a_time_in_eight_thousand_years(cluster: Any) -> None:
    """As a cloud's notice may say."""
    worker = await cluster.worker("w1")
    await worker.say(draining=fleet_pb2.Draining(deadline_s=2.5e11, reason="reclaim"))
    session = next(iter(cluster.coordinator.state.sessions.values()))
    await wait_until(lambda: session.draining, what="it drains")
    assert worker.ended is None
