"""Runs, their leases and their ends."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from ebbtide.errors import (
    AlreadyExists,
    InvalidRequest,
    LeaseSuperseded,
    NotFound,
    NotReady,
    StoreUnavailable,
    Unavailable,
)
from ebbtide.rpc.status_table import translated
from ebbtide.types.run import TrainerSpec
from ebbtide.v1 import rollouts_pb2, runs_pb2, types_pb2
from tests.support.waiting import wait_until


async def test_a_run_is_made_once_per_id(cluster: Any) -> None:
    run = await cluster.run()
    spec = (await run.get()).spec
    again = await cluster.call(cluster.runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id="r", spec=spec))
    assert again.status == types_pb2.RUN_STATUS_RUNNING
    spec.seed = 8
    with pytest.raises(AlreadyExists, match="run r"):
        await cluster.call(cluster.runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id="r", spec=spec))
    spec.sampling.temperature = -1
    with pytest.raises(InvalidRequest, match=r"spec.sampling.temperature"):
        await cluster.call(cluster.runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id="q", spec=spec))


async def test_a_superseded_lease_can_do_nothing(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    old = runs_pb2.LeaseRef()
    old.CopyFrom(run.lease)
    with pytest.raises(NotReady, match="held by host"):
        await run.claim("other")
    await run.claim_when_free("other")  # the first holder did not renew
    run.lease = old
    before = await run.get()
    for call in (
        run.submit("b"), run.cancel("a"), run.acknowledge("a"), run.complete("e", "a", drop="x"), run.commit("1-1"),
        run.announce(step=1), run.finish(),
        cluster.call(cluster.runs.RenewLease, old),
        cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=old, events=[runs_pb2.RunEvent(kind="step")])),
    ):  # fmt: skip
        with pytest.raises(LeaseSuperseded):
            await call
    after = await run.get()
    assert (after.counters, after.newest) == (before.counters, before.newest)


async def test_the_same_holder_claims_at_once_and_a_renewed_lease_stays(cluster: Any) -> None:
    run = await cluster.run()
    first = run.lease.fence
    assert (await run.claim()).fence != first
    for _ in range(3):
        await cluster.call(cluster.runs.RenewLease, run.lease)
        with pytest.raises(NotReady):
            await run.claim("other", "trainer")
        await run.claim("host")
    driver = await run.claim("other", "driver")
    assert dict((await run.get()).holders) == {"trainer": "host", "driver": "other"}
    await cluster.call(cluster.runs.ReleaseLease, driver)
    assert dict((await run.get()).holders) == {"trainer": "host"}
    with pytest.raises(LeaseSuperseded):
        await run.submit("a")


async def test_any_run_is_claimed_oldest_first(cluster: Any) -> None:
    for run_id in ("b", "a"):
        await cluster.run(run_id, version=False)
    request = runs_pb2.ClaimRunRequest(role="driver", holder="d")
    assert (await cluster.call(cluster.runs.ClaimRun, request)).run.run_id == "b"
    request.holder = "d2"
    assert (await cluster.call(cluster.runs.ClaimRun, request)).run.run_id == "a"
    request.holder = "d3"
    with pytest.raises(NotReady, match="no run wants a driver"):
        await cluster.call(cluster.runs.ClaimRun, request)
    with pytest.raises(NotFound):
        await cluster.call(cluster.runs.ClaimRun, runs_pb2.ClaimRunRequest(run_id="zz", role="driver", holder="d"))


async def test_who_starts_again_under_another_name_finds_back_to_its_run(cluster: Any) -> None:
    old = await cluster.run("old", version=False)
    young = await cluster.run("young", version=False)
    await cluster.call(cluster.runs.ReleaseLease, young.lease)  # nobody works on it yet

    async def claim(holder: str, waited_s: float) -> Any:
        request = runs_pb2.ClaimRunRequest(role="driver", holder=holder, waited_s=waited_s)
        return await cluster.call(cluster.runs.ClaimRun, request)

    async def claimed(holder: str) -> Any:
        await cluster.call(cluster.runs.RenewLease, old.lease)  # its trainer waits for a driver
        with contextlib.suppress(NotReady):
            return await claim(holder, 0.0)

    first = await claim("a", 0.0)
    assert first.run.run_id == (await claim("a", 0.0)).run.run_id == "old"
    with pytest.raises(NotReady, match="a may have left run old"):
        await claim("b", 0.0)
    assert (await claim("b", 60.0)).run.run_id == "young"  # a has renewed its lease since b asked first
    lease = await wait_until(lambda: claimed("c"))  # a does so no more
    assert lease.run.run_id == "old"


async def test_a_run_whose_trainer_comes_from_outside_is_claimed_by_its_id_alone(cluster: Any) -> None:
    own = await cluster.run("own", version=False, trainer=TrainerSpec(name="external"))
    await cluster.call(cluster.runs.ReleaseLease, own.lease)
    for role in ("trainer", "driver"):
        with pytest.raises(NotReady, match=f"no run wants a {role}"):
            await cluster.call(cluster.runs.ClaimRun, runs_pb2.ClaimRunRequest(role=role, holder="cluster"))
    await cluster.run("younger", version=False)
    request = runs_pb2.ClaimRunRequest(role="driver", holder="cluster")
    assert (await cluster.call(cluster.runs.ClaimRun, request)).run.run_id == "younger"
    assert (await own.claim("mine")).run_id == "own"
    assert (await own.claim("mine", "driver")).run_id == "own"


async def test_versions_are_never_given_twice_and_announced_once(cluster: Any) -> None:
    run = await cluster.run()
    assert [await run.announce(step=1), await run.announce(step=2)] == [2, 3]
    newest = (await run.get()).newest
    assert (newest.version, newest.step, newest.root) == (3, 2, b"\x03" * 32)
    repeat = runs_pb2.AnnounceVersionRequest(lease=run.lease, version=newest)
    await cluster.call(cluster.runs.AnnounceVersion, repeat)
    repeat.version.root = b"\x09" * 32
    with pytest.raises(AlreadyExists, match="version 3"):
        await cluster.call(cluster.runs.AnnounceVersion, repeat)
    repeat.version.version = 9
    with pytest.raises(InvalidRequest, match=r"version.version: 9 cannot be announced: reserve it first"):
        await cluster.call(cluster.runs.AnnounceVersion, repeat)
    events = await run.events("version", 3)
    assert [(event.values["version"], event.values["step"]) for event in events] == [(1, 0), (2, 1), (3, 2)]


async def test_cancelling_a_run_stops_its_workers_and_leaves_only_its_record(cluster: Any, redis_server: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=1)
    await run.submit("a", "b")
    await worker.has("a")
    await worker.add("a", 0, 4)
    cancel = runs_pb2.CancelRunRequest(run_id="r")
    record = await cluster.call(cluster.runs.CancelRun, cancel)
    assert record.status == types_pb2.RUN_STATUS_CANCELLED
    assert dict(record.dropped) == {"cancelled": 2}
    await wait_until(lambda: worker.cancelled == ["a"])
    assert (await cluster.call(cluster.runs.CancelRun, cancel)).status == types_pb2.RUN_STATUS_CANCELLED
    with pytest.raises(LeaseSuperseded, match="has ended"):
        await run.submit("c")
    kept = {f"ebbtide:{{r}}:{name}" for name in ("run", "count", "events", "chatter", "spans")}

    async def keys() -> set[str]:
        return {key.decode() for key in await cluster.coordinator.link.call("KEYS", "ebbtide:{r}:*")}

    async def swept() -> bool:
        return await keys() == kept

    await wait_until(swept)
    assert all([await cluster.coordinator.link.call("TTL", key) > 0 for key in kept])
    statuses = await run.events("status", 3)
    assert [event.key for event in statuses] == ["PENDING", "RUNNING", "CANCELLED"]


async def test_watchers_of_a_run_that_ends_are_let_go(cluster: Any) -> None:
    run = await cluster.run()
    stream = cluster.rollouts.WatchFinished(rollouts_pb2.WatchFinishedRequest(run_id="r"))
    reading = asyncio.create_task(stream.read())
    await run.finish()
    assert await reading is grpc.aio.EOF
    events = cluster.runs.WatchRun(runs_pb2.WatchRunRequest(run_id="r"))
    kinds = [event.key async for event in events if event.kind == "status"]
    assert kinds == ["PENDING", "RUNNING", "FINISHED"]
    with pytest.raises(InvalidRequest, match="cursor"), translated("coordinator"):
        await cluster.runs.WatchRun(runs_pb2.WatchRunRequest(run_id="r", cursor="x")).read()


@pytest.mark.parametrize("notified", [True, False])
async def test_whoever_streams_tokens_of_a_run_that_ends_is_told(cluster: Any, monkeypatch: Any, notified: Any) -> None:
    notifier = cluster.coordinator._notifier
    if not notified:  # they look again by themselves
        monkeypatch.setattr("ebbtide.coordinator.state.notifier._LOOK_AGAIN_S", 0.02)
        monkeypatch.setattr(notifier, "notify", lambda *_: None)
    run = await cluster.run()
    await run.submit("a")
    stream = cluster.rollouts.StreamTokens(rollouts_pb2.StreamTokensRequest(run_id="r", rollout_id="a"))
    reading = asyncio.create_task(stream.read())
    await wait_until(lambda: ("tokens", "r", "a") in notifier._listeners)
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="r"))
    with pytest.raises(LeaseSuperseded, match="run r has ended"), translated("coordinator"):
        await asyncio.wait_for(reading, 5)


async def test_a_run_whose_end_was_not_answered_ends_for_all_when_the_call_is_repeated(
    cluster: Any, monkeypatch: Any
) -> None:
    run = await cluster.run()
    stream = cluster.rollouts.WatchFinished(rollouts_pb2.WatchFinishedRequest(run_id="r"))
    reading = asyncio.create_task(stream.read())
    runs = cluster.coordinator.store.runs
    end = runs.end

    async def unanswered(*args: Any, **more: Any) -> None:
        await end(*args, **more)
        raise StoreUnavailable("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "end", unanswered)
        with pytest.raises(Unavailable):
            await run.finish()
    assert not reading.done()
    assert (await run.finish()).status == types_pb2.RUN_STATUS_FINISHED
    assert await asyncio.wait_for(reading, 5) is grpc.aio.EOF
    assert not cluster.coordinator.state.runs


async def test_reported_events_are_taken_once_per_key(cluster: Any) -> None:
    run = await cluster.run()
    event = runs_pb2.RunEvent(kind="step", key="1", message="m", values={"reward": 0.5}, labels={"a": "b"})
    for _ in range(2):
        await cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=[event]))
    event.key = "2"
    await cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=[event]))
    found = await run.events("step", 2)
    assert [one.key for one in found] == ["1", "2"]
    assert (found[0].values["reward"], found[0].labels["a"]) == (0.5, "b")


async def test_a_run_says_what_it_waits_for(cluster: Any) -> None:
    run = await cluster.run(version=False)
    assert (await run.get()).message == "waits for its first policy version"
    await run.announce(step=0)
    assert (await run.get()).message == "waits for workers: none is attached"
    await cluster.worker("w1")
    assert (await run.get()).message == ""
