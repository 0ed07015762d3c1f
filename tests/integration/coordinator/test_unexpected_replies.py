"""A run for which the store gives unexpected replies pauses; others go on, and it goes on once its data is mended."""

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ebbtide.coordinator.metrics import measure
from ebbtide.errors import EbbtideError, Internal, InvalidRequest, Unavailable
from ebbtide.store.scripts import run_key, run_prefix
from ebbtide.types.run import ShareSpec
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


async def spoil(cluster: Any, run_id: str, name: str) -> None:
    """Replace a key of the run by one of another type."""
    key = key_of(run_id, name)
    link = cluster.coordinator.link
    if await link.call("EXISTS", key):
        await link.call("RENAME", key, f"aside:{key}")
    if name == "CLAIM":
        await link.call("HSET", key, "of another", "type")
    else:
        await link.call("SET", key, "of another type")


async def mend(cluster: Any, run_id: str, name: str) -> None:
    """In one step, as operators are told: a run without its fence is over."""
    key = key_of(run_id, name)
    link = cluster.coordinator.link
    if await link.call("EXISTS", f"aside:{key}"):
        await link.call("RENAME", f"aside:{key}", key)
    else:
        await link.call("DEL", key)


def key_of(run_id: str, name: str) -> str:
    return run_key(run_id, "CLAIM", "trainer") if name == "CLAIM" else run_key(run_id, name)


def loops_run(cluster: Any) -> bool:
    return not any(loop.done() for loop in cluster._loops)


def paused(cluster: Any) -> list[Any]:
    return [run for run in cluster.coordinator.state.runs.values() if run.mirror.paused(time.monotonic())]


async def stored(cluster: Any, run_id: str) -> set[str]:
    """The keys of a run, but for those that expire by themselves."""
    link = cluster.coordinator.link
    keys = await link.call("KEYS", f"{run_prefix(run_id)}*")
    return {key.decode() for key in keys if await link.call("PTTL", key) < 0}


async def pauses_again(cluster: Any, run_id: str) -> None:
    """Wait until a skipped run was tried again in vain."""
    pause = cluster.coordinator.state.skipped[run_id]
    before = pause._until
    await wait_until(lambda: pause._until > before, what="the skipped run is tried again")


async def placed_apart(cluster: Any) -> tuple[Any, Any]:
    """Two workers, the first with rollout a, the second with b."""
    workers = [await cluster.worker(name, slots=1) for name in ("w1", "w2")]

    async def placed() -> bool:
        for worker in workers:
            if asked := [name for name in worker.asked if name in worker.assigned]:
                worker.asked.clear()
                await worker.hand_back(*asked)
        return sorted(name for worker in workers for name in worker.assigned) == ["a", "b"]

    await wait_until(placed, what="both rollouts are placed")
    workers.sort(key=lambda worker: list(worker.assigned))
    return workers[0], workers[1]


async def open_again(worker: Any) -> None:
    """What a worker does whose append stream ended."""

    async def opened() -> bool:
        try:
            await worker.open_append()
        except (Unavailable, AssertionError):
            return False
        return True

    await wait_until(opened, what="the worker's new stream")


def running(cluster: Any, run_id: str) -> Any:
    return cluster.coordinator.state.runs[run_id].running


@pytest.mark.parametrize("name", ["OPEN", "FENCE", "RUN"])
async def test_a_run_with_broken_data_pauses_and_others_go_on(cluster: Any, name: str) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await spoil(cluster, "broken", name)
    cluster.coordinator.state.runs["broken"].mirror.mark_stale()
    await cluster.worker("w1")
    await cluster.worker("w2")
    live = cluster.coordinator.state.runs["broken"]
    await wait_until(lambda: live.mirror.stale and live in set(paused(cluster)), what="the broken run pauses")
    await other.submit("b")
    await wait_until(lambda: "b" in running(cluster, "other"), what="the other run's rollout is placed")
    assert "a" not in live.running
    with pytest.raises(EbbtideError):
        await broken.submit("c")
    assert await other.submit("d") == [1]
    assert loops_run(cluster)
    await mend(cluster, "broken", name)
    await wait_until(lambda: "a" in live.running, what="the mended run goes on")
    assert loops_run(cluster)


async def test_tokens_of_other_runs_are_stored_beside_those_of_a_broken_one(cluster: Any) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await other.submit("b")
    at, free = await placed_apart(cluster)
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


@pytest.mark.parametrize("name", ["OPEN", "FENCE", "RUN"])
async def test_tokens_of_other_runs_go_on_when_the_store_came_back(
    tmp_path: Path, cluster_with: Any, name: str
) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        async with cluster_with(redis.url) as cluster:
            broken, other = await cluster.run("broken"), await cluster.run("other")
            await broken.submit("a")
            await other.submit("b")
            at, free = await placed_apart(cluster)
            lost = at.delta("a", 0, 2)
            await spoil(cluster, "broken", name)
            life = cluster.coordinator.state.incarnation
            redis.kill()
            redis.start()
            await wait_until(life.over.is_set, what="the coordinator noticing")
            await open_again(free)
            refused, stored = await free.send(lost, free.delta("b", 0, 2))  # one stream, as of a worker between runs
            assert (refused.status.name, stored.status.name, stored.stored) == ("SUPERSEDED", "STORED", 2)
            assert loops_run(cluster)
            await mend(cluster, "broken", name)
            live = cluster.coordinator.state.runs["broken"]
            await wait_until(live.mirror.reconciled.is_set, what="the mended run is reconciled")


async def test_attempts_of_a_broken_run_hold_back_no_tokens_of_others_after_a_restart(cluster: Any) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await other.submit("b")
    at, free = await placed_apart(cluster)
    held, lost = free.assigned["b"], at.delta("a", 0, 2)
    await spoil(cluster, "broken", "OPEN")
    await cluster.restart()
    back = await cluster.worker("w2", held=[fleet_pb2.HeldAttempt(attempt=held.attempt)])
    back.assigned["b"] = held
    refused, stored = await back.send(lost, back.delta("b", 0, 2))
    assert (refused.status.name, stored.status.name, stored.stored) == ("SUPERSEDED", "STORED", 2)
    assert loops_run(cluster)


@pytest.mark.parametrize("name", ["OPEN", "FENCE", "RUN", "CLAIM"])
async def test_a_coordinator_starts_with_a_broken_run(cluster: Any, name: str) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a")
    await spoil(cluster, "broken", name)
    await cluster.restart()
    await other.claim_when_free("host")
    worker = await cluster.worker("w1")
    assert await other.submit("b") == [1]
    await wait_until(lambda: "b" in worker.assigned, what="the other run's rollout is placed")
    await worker.send(worker.delta("b", 0, 2, finish=types_pb2.FINISH_REASON_STOP))
    if name == "OPEN":
        await broken.claim_when_free("host")
    with pytest.raises(Internal):
        await broken.submit("c")
    assert loops_run(cluster)
    await mend(cluster, "broken", name)
    await wait_until(lambda: "a" in worker.assigned, what="the mended run goes on")  # though nobody asks for it
    await broken.claim_when_free("host")
    assert await broken.submit("c") == [1]


@pytest.mark.parametrize("name", ["FENCE", "RUN"])
async def test_a_run_that_was_skipped_at_the_start_keeps_all_its_data(cluster: Any, name: str) -> None:
    broken, other = await cluster.run("broken"), await cluster.run("other")
    await broken.submit("a", "b")
    await other.submit("c")
    await spoil(cluster, "broken", name)
    await cluster.restart()
    state = cluster.coordinator.state
    assert set(state.skipped) == {"broken"}
    before = await stored(cluster, "broken")
    former = broken.lease
    assert before
    state.sweep(["broken"])  # whoever takes it for over
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="other"))
    await wait_until(lambda: not state.ended, what="ended runs were deleted")
    for refused in (broken.finish(), broken.cancel("a"), cluster.call(cluster.runs.RenewLease, former)):
        with pytest.raises(Internal):
            await refused
    with pytest.raises(Internal):
        await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="broken"))
    assert await stored(cluster, "broken") == before
    key = key_of("broken", name)
    await cluster.coordinator.link.call("DEL", key)  # an operator mends it in two steps
    await pauses_again(cluster, "broken")
    assert await stored(cluster, "broken") == before - {key}
    await mend(cluster, "broken", name)
    await wait_until(lambda: not state.skipped and len(state.runs["broken"].queue) == 2, what="the mended run is read")
    assert loops_run(cluster)


async def test_a_write_to_a_mended_run_before_it_is_taken_over_ends_no_coordinator(cluster: Any) -> None:
    broken = await cluster.run("broken")
    await spoil(cluster, "broken", "FENCE")
    await cluster.restart()
    state = cluster.coordinator.state
    state.skipped["broken"].begin(Internal("broken"), state.clock())
    await mend(cluster, "broken", "FENCE")
    former = broken.lease  # the fence has the former coordinator's term
    with pytest.raises(Internal):
        await cluster.call(cluster.runs.RenewLease, former)
    await broken.claim_when_free("host")
    assert await broken.submit("a") == [1]
    assert not cluster.coordinator.link.superseded.is_set()
    assert loops_run(cluster)


async def test_a_standby_takes_over_beside_a_broken_run(cluster: Any) -> None:
    await cluster.run("broken")
    other = await cluster.run("other")
    for name in ("FENCE", "RUN"):
        await spoil(cluster, "broken", name)
    cluster._more["standby"] = True
    await cluster.restart()
    assert set(cluster.coordinator.state.runs) == {"other"}
    assert set(cluster.coordinator.state.skipped) == {"broken"}
    await other.claim_when_free("host")
    assert await other.submit("a") == [1]


@pytest.mark.parametrize("name", ["FENCE", "RUN", "CLAIM"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_calls_that_look_at_all_runs_pass_over_a_broken_one(cluster: Any, name: str, restarted: bool) -> None:
    await cluster.run("broken")
    await cluster.run("other")
    for run_id in ("broken", "other"):
        await cluster.coordinator.link.call("DEL", run_key(run_id, "CLAIM", "trainer"))  # both are free
    await spoil(cluster, "broken", name)
    if restarted:
        await cluster.restart()
    claim = runs_pb2.ClaimRunRequest(role="trainer", holder="another")
    assert (await cluster.call(cluster.runs.ClaimRun, claim)).ref.run_id == "other"
    listed = await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())
    assert "other" in {one.run_id for one in listed.runs}
    await cluster.run("third", share=ShareSpec(floor=0.1))
    assert "third" in cluster.coordinator.state.runs
    await measure(cluster.coordinator.state, cluster.coordinator.store)
    assert loops_run(cluster)


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


async def test_the_limit_of_a_users_runs_is_checked_beside_a_broken_run(cluster: Any) -> None:
    await cluster.run("broken")
    await cluster.restart()  # who submitted it must be read again
    await spoil(cluster, "broken", "RUN")
    await cluster.run("other")
    assert "other" in cluster.coordinator.state.runs


async def test_waiting_trajectories_are_counted_beside_a_broken_run(cluster: Any) -> None:
    await cluster.run("broken")
    other, worker = await cluster.run("other"), await cluster.worker("w1")
    await other.submit("b")
    await worker.has("b")
    await worker.add("b", 0, 2, types_pb2.FINISH_REASON_STOP)
    await other.complete("e.b", "b")
    await spoil(cluster, "broken", "COUNT")
    await measure(cluster.coordinator.state, cluster.coordinator.store)
    assert REGISTRY.get_sample_value("ebbtide_coordinator_trajectories_waiting") == 1


async def test_watchers_are_told_of_the_events_before_a_refused_page(cluster: Any, monkeypatch: Any) -> None:
    run, told = await cluster.run(), list[tuple[str, str]]()
    store, notifier = cluster.coordinator.store.events, cluster.coordinator._notifier
    report, pages = store.report, list[int]()

    async def refuse_later(lease: Any, events: Any, **more: Any) -> None:
        pages.append(len(events))
        if len(pages) > 1:
            raise InvalidRequest("no more", field="events")
        await report(lease, events, **more)

    monkeypatch.setattr(store, "report", refuse_later)
    monkeypatch.setattr(notifier, "notify", lambda *topic: told.append(topic))
    events = [runs_pb2.RunEvent(kind="note", message=str(i)) for i in range(200)]
    with pytest.raises(InvalidRequest):
        await cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))
    assert len(pages) == 2
    assert ("events", "r") in told
