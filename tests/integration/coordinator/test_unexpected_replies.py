"""A run for which the store gives unexpected replies pauses; others go on, and it goes on once its data is mended."""

import time
from typing import Any

import pytest

from ebbtide.errors import EbbtideError, Internal
from ebbtide.store.store_keys import run_key
from ebbtide.testing import wait_until
from ebbtide.v1 import runs_pb2, types_pb2


async def spoil(cluster: Any, run_id: str, name: str) -> None:
    """Replace a key of the run by one of another type."""
    key = run_key(run_id, name)
    link = cluster.coordinator.link
    if await link.call("EXISTS", key):
        await link.call("RENAME", key, f"aside:{key}")
    await link.call("SET", key, "of another type")


async def mend(cluster: Any, run_id: str, name: str) -> None:
    key = run_key(run_id, name)
    link = cluster.coordinator.link
    await link.call("DEL", key)
    if await link.call("EXISTS", f"aside:{key}"):
        await link.call("RENAME", f"aside:{key}", key)


def loops_run(cluster: Any) -> bool:
    return not any(loop.done() for loop in cluster._loops)


def paused(cluster: Any) -> list[Any]:
    return [run for run in cluster.coordinator.state.runs.values() if run.paused(time.monotonic())]


def running(cluster: Any, run_id: str) -> Any:
    return cluster.coordinator.state.runs[run_id].running


@pytest.mark.parametrize("name", ["OPEN", "FENCE"])
async def test_a_run_with_broken_data_pauses_and_others_go_on(cluster: Any, name: str) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await spoil(cluster, "broken", name)
    cluster.coordinator.state.runs["broken"].mark_stale()
    await cluster.worker("w1")
    await cluster.worker("w2")
    mirror = cluster.coordinator.state.runs["broken"]
    await wait_until(lambda: mirror.stale and mirror in set(paused(cluster)), what="the broken run pauses")
    await other.submit("b")
    await wait_until(lambda: "b" in running(cluster, "other"), what="the other run's rollout is placed")
    assert "a" not in mirror.running
    with pytest.raises(EbbtideError):
        await broken.submit("c")
    assert await other.submit("d") == [1]
    assert loops_run(cluster)
    await mend(cluster, "broken", name)
    await wait_until(lambda: "a" in mirror.running, what="the mended run goes on")
    assert loops_run(cluster)


async def test_tokens_of_other_runs_are_stored_beside_those_of_a_broken_one(cluster: Any) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    first, second = await cluster.worker("w1", slots=1), await cluster.worker("w2", slots=1)
    await broken.submit("a")
    await wait_until(lambda: "a" in first.assigned or "a" in second.assigned, what="the rollout is placed")
    at, free = (first, second) if "a" in first.assigned else (second, first)
    await other.submit("b")
    await wait_until(lambda: "b" in free.assigned, what="the other rollout is placed")
    await spoil(cluster, "broken", "FENCE")
    (refused,) = await at.send(at.delta("a", 0, 2))
    assert refused.status.name == "SUPERSEDED"
    (stored,) = await free.send(free.delta("b", 0, 2))
    assert (stored.status.name, stored.stored) == ("STORED", 2)
    assert loops_run(cluster)
    await mend(cluster, "broken", "FENCE")
    first_attempt = running(cluster, "broken")["a"].attempt_id

    def placed_again() -> bool:
        attempt = running(cluster, "broken").get("a")
        return attempt is not None and attempt.session is not None and attempt.attempt_id != first_attempt

    await wait_until(placed_again, what="the rollout is placed again")


async def test_a_coordinator_starts_with_a_broken_run(cluster: Any) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await spoil(cluster, "broken", "OPEN")
    await cluster.restart()
    await other.claim_when_free("host")
    worker = await cluster.worker("w1")
    assert await other.submit("b") == [1]
    await wait_until(lambda: "b" in worker.assigned, what="the other run's rollout is placed")
    await worker.send(worker.delta("b", 0, 2, finish=types_pb2.FINISH_REASON_STOP))
    await broken.claim_when_free("host")
    with pytest.raises(Internal):
        await broken.submit("c")
    await mend(cluster, "broken", "OPEN")
    await wait_until(lambda: "a" in running(cluster, "broken"), what="the mended run goes on")


async def test_an_ended_run_that_cannot_be_deleted_stops_nobody(cluster: Any) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await spoil(cluster, "broken", "FINISHED")
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="broken"))
    await wait_until(lambda: not cluster.coordinator.state.ended, what="its data was looked at")
    assert await other.submit("b") == [1]
    worker = await cluster.worker("w1")
    await wait_until(lambda: "b" in worker.assigned, what="the other run's rollout is placed")
    assert loops_run(cluster)
