"""Requests of gateways' clients: leases with many holders, accounts of their own, and what is kept for how long."""

from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.errors import AlreadyExists, InvalidRequest, LeaseSuperseded, NoCapacity, NotFound
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.rollout import FinishReason, RolloutKind, RolloutRequest, SubmitOutcome
from ebbtide.types.run import Sampling
from ebbtide.v1 import runs_pb2, types_pb2
from tests.fakes.scripted_worker import tokens
from tests.integration.coordinator.gateways import answer, asked, gateway, keys, pass_time
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
ACCEPTED, KNOWN, COMPLETED = SubmitOutcome.ACCEPTED, SubmitOutcome.KNOWN, SubmitOutcome.COMPLETED


async def test_any_number_of_gateways_have_a_lease_and_a_holder_that_claims_again_ends_only_its_own(
    cluster: Any,
) -> None:
    run = await cluster.run()
    async with gateway(cluster, "g1") as first, gateway(cluster, "g2") as second:
        assert (first.role, second.role) == ("gateway/g1", "gateway/g2")
        assert await first.submit_rollouts([asked("a")]) == [ACCEPTED]
        async with gateway(cluster, "g1") as again:
            with pytest.raises(LeaseSuperseded, match="claimed by another holder"):
                await first.submit_rollouts([asked("b")])
            assert await again.submit_rollouts([asked("b")]) == [ACCEPTED]
            assert await second.submit_rollouts([asked("c")]) == [ACCEPTED]
            await again.release()
            with pytest.raises(LeaseSuperseded):
                await again.submit_rollouts([asked("d")])
    assert dict((await run.get()).holders) == {"trainer": "host"}
    assert await run.submit("t") == [1]  # the trainer's lease is as it was


async def test_another_request_of_a_client_is_refused_under_the_id_of_one_with_the_same_rollout(cluster: Any) -> None:
    await cluster.run()

    def of_client(digest: bytes) -> RolloutRequest:
        return replace(asked("a"), client_digest=digest)

    async with gateway(cluster) as lease:
        assert await lease.submit_rollouts([of_client(b"one")]) == [ACCEPTED]
        assert await lease.submit_rollouts([of_client(b"one")]) == [KNOWN]
        with pytest.raises(AlreadyExists, match="rollout a"):
            await lease.submit_rollouts([of_client(b"other")])
        with pytest.raises(AlreadyExists, match="rollout a"):
            await lease.submit_rollouts([of_client(b"")])
        with pytest.raises(InvalidRequest, match=r"rollouts\[0\].client_digest: must be at most 32 bytes"):
            await lease.submit_rollouts([of_client(b"x" * 33)])


async def test_a_gateway_does_not_begin_a_run_and_has_to_name_it(cluster: Any) -> None:
    run = await cluster.run(version=False)
    await cluster.call(cluster.runs.ReleaseLease, run.lease)
    await cluster.run("q", version=False)
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="q"))
    async with gateway(cluster):
        assert (await run.get()).holders == {}
    with pytest.raises(LeaseSuperseded, match="run q has ended"):
        async with gateway(cluster, run_id="q"):
            pass
    with pytest.raises(InvalidRequest, match="run_id: is required"):
        await cluster.call(cluster.runs.ClaimRun, runs_pb2.ClaimRunRequest(role="gateway", holder="g1"))
    with pytest.raises(InvalidRequest, match="role: must be one of trainer, driver, gateway"):
        await run.claim("g", "gateway/g")


async def test_a_run_that_waits_for_its_trainer_serves_and_goes_on_waiting(cluster: Any) -> None:
    run = await cluster.run(version=False)
    record = await run.get()
    waiting = runs_pb2.SubmitRunRequest(run_id="w", spec=record.spec)
    await cluster.call(cluster.runs.SubmitRun, waiting)
    async with gateway(cluster, run_id="w") as lease:
        assert await lease.submit_rollouts([asked("a")]) == [ACCEPTED]
        found = await cluster.call(cluster.runs.GetRun, runs_pb2.GetRunRequest(run_id="w"))
        assert found.status == types_pb2.RUN_STATUS_PENDING


async def test_a_gateways_lease_is_for_requests_alone(cluster: Any) -> None:
    run = await cluster.run()
    await run.submit("t")
    async with gateway(cluster) as lease:
        for kind in (RolloutKind.TRAIN, RolloutKind.EVAL):
            with pytest.raises(InvalidRequest, match=r"rollouts\[1\].kind: a gateway's lease takes requests only"):
                await lease.submit_rollouts([asked("a"), asked("b", kind=kind)])
        with pytest.raises(InvalidRequest, match=r"rollout_ids\[0\]: is no request"):
            await lease.cancel_rollouts(["t"])
        await lease.submit_rollouts([asked("a")])
        with pytest.raises(InvalidRequest, match=r"rollouts\[0\].kind: only a gateway's lease takes requests"):
            await run.submit("c", kind=RolloutKind.REQUEST)
        with pytest.raises(InvalidRequest, match=r"rollouts\[0\].sampling.without_logprobs: the trainer needs"):
            await run.submit("c", sampling=Sampling(without_logprobs=True))
        with pytest.raises(InvalidRequest, match=r"rollout_ids\[0\]: a was never submitted"):
            await run.acknowledge("a")
        with pytest.raises(InvalidRequest, match=r"rollout_ids\[0\]: a was never submitted"):
            await run.complete("e", "a", drop="x")
        run.lease = lease._fence
        for call in (run.acknowledge("a"), run.complete("e", "a"), run.commit("1-1"), run.announce(1), run.finish()):
            with pytest.raises(InvalidRequest, match=r"lease\.role"):
                await call
    assert [await run.count(name) for name in ("submitted", "requests_submitted", "queued")] == [1, 1, 2]


async def test_a_request_is_counted_apart_and_not_shown_to_the_driver(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("a")])
        await run.submit("t")
        await worker.has("a", "t")
        await worker.add("a", 0, 4, STOP)
        await worker.add("t", 0, 4, STOP)
        assert [one.rollout_id for one in await run.finished(1)] == ["t"]
        found, last = await answer(lease, "a")
        assert (found, last.reason, last.message) == (tokens(0, 4), FinishReason.STOP, "")
    await run.complete("e.t", "t", drop="environment_failure")
    counters = (await run.finish()).counters
    assert [counters[name] for name in ("submitted", "dropped", "requests_submitted", "requests_completed")] == [1] * 4


async def test_a_finished_request_is_kept_for_its_time_and_then_deleted(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("a"), asked("open")])
        await worker.has("a", "open")
        await worker.add("a", 0, 4, STOP)
        await pass_time(cluster, 590)
        assert await lease.submit_rollouts([asked("a")]) == [KNOWN]
        assert (await answer(lease, "a", 2))[0] == tokens(2, 2)
        await pass_time(cluster, 20)
        with pytest.raises(NotFound, match="rollout a is not here"):
            await answer(lease, "a")
        assert await lease.submit_rollouts([asked("a")]) == [COMPLETED]
        assert await keys(cluster) == {"rollout:open", "gateways", "gone"}
        await pass_time(cluster, 610)  # late repeats are recognised no longer
        assert await keys(cluster) == {"rollout:open", "gateways"}
    counters = (await run.get()).counters
    assert [counters[name] for name in ("requests_completed", "finished", "running", "bytes")] == [1, 0, 1, 12]


async def test_a_cancelled_request_ends_with_the_tokens_it_has(cluster: Any) -> None:
    """A gateway that finds a stop string ends the rollout, and a repeat of the request reads the same tokens."""
    run, worker = await cluster.run(), await cluster.worker("w1", slots=1)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("a")])
        await worker.has("a")
        await worker.add("a", 0, 4)
        late = worker.delta("a", 4, 2)
        await lease.submit_rollouts([asked("b")])
        await lease.cancel_rollouts(["b", "a", "unknown"], "stopped")
        await wait_until(lambda: worker.cancelled == ["a"])
        (ack,) = await worker.send(late)
        assert ack.status is AppendStatus.SUPERSEDED
        await lease.cancel_rollouts(["a"], "again")
        assert await lease.submit_rollouts([asked("a"), asked("b")]) == [KNOWN, KNOWN]
        found, last = await answer(lease, "a")
        assert (found, last.reason, last.message) == (tokens(0, 4), FinishReason.CANCELLED, "stopped")
        assert (await answer(lease, "b"))[0] == b""
        await lease.submit_rollouts([asked("c")])
        await worker.has("c")  # its slot is free
    assert [await run.count(name) for name in ("requests_completed", "queued", "running")] == [2, 0, 1]


async def test_a_request_that_no_worker_can_make_ends_with_the_evidence(cluster_with: Any) -> None:
    async with cluster_with(max_stalled_attempts=1) as cluster:
        await cluster.run()
        worker = await cluster.worker("w1")
        async with gateway(cluster) as lease:
            await lease.submit_rollouts([asked("a")])
            await worker.has("a")
            await worker.hand_back("a", cause=types_pb2.END_CAUSE_FAILED, reason="the engine refused it")
            _, last = await answer(lease, "a")
            assert last.reason is FinishReason.DEAD_LETTERED
            assert "the engine refused it" in last.message


async def test_interactive_requests_are_given_first_and_named_so_to_the_worker(cluster: Any) -> None:
    """Also by a coordinator that read them back."""
    await cluster.run()
    async with gateway(cluster) as lease:
        batch, chat = asked("batch", priority=-5), asked("chat", interactive=True)
        await lease.submit_rollouts([batch, chat])
        assert await lease.submit_rollouts([asked("chat")]) == [KNOWN]  # who waits may differ in a repeat
    await cluster.restart()
    worker = await cluster.worker("w1", slots=1)
    await worker.has("chat")
    assert worker.assigned["chat"].interactive
    await worker.add("chat", 0, 1, STOP)
    await worker.has("batch")
    assert not worker.assigned["batch"].interactive


async def test_requests_take_of_the_runs_quota_and_leave_a_quarter_to_training(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)
    big = bytes(4) * 65000
    async with gateway(cluster) as lease:
        for number in range(3):
            await lease.submit_rollouts([asked(f"a{number}", prompt_ids=big)])
        with pytest.raises(NoCapacity, match="gateways may use three quarters") as refused:
            await lease.submit_rollouts([asked("b", prompt_ids=big)], wait=False)
        assert refused.value.retry_after_s > 0
        assert await run.submit("t1", prompt_ids=big) == [1]
        with pytest.raises(NoCapacity, match="complete, commit or acknowledge"):
            await run.submit("t2", prompt_ids=big)
        await lease.cancel_rollouts([f"a{number}" for number in range(3)])
        await pass_time(cluster, 601)
        assert await run.submit("t2", prompt_ids=big) == [1]


async def test_requests_leave_a_quarter_of_the_queue_to_training(cluster_with: Any) -> None:
    async with cluster_with(max_open=4) as cluster:
        run = await cluster.run()
        async with gateway(cluster) as lease:
            await lease.submit_rollouts([asked("a"), asked("b"), asked("c")])
            with pytest.raises(NoCapacity, match="places in its queue"):
                await lease.submit_rollouts([asked("d")], wait=False)
            assert await run.submit("t") == [1]


async def test_what_another_gateway_began_is_known_and_read_from_the_start(cluster: Any) -> None:
    await cluster.run()
    worker = await cluster.worker("w1")
    async with gateway(cluster, "g1") as lease:
        await lease.submit_rollouts([asked("a")])
        await worker.has("a")
        await worker.add("a", 0, 4)
    await cluster.restart()
    worker = await cluster.worker("w2")
    async with gateway(cluster, "g2") as lease:
        assert await lease.submit_rollouts([asked("a")]) == [KNOWN]
        await worker.has("a")
        await worker.add("a", 4, 2, STOP)
        assert (await answer(lease, "a"))[0] == tokens(0, 6)


async def test_gateways_that_were_silent_for_an_hour_leave_no_fence(cluster: Any) -> None:
    run = await cluster.run()
    link = cluster.coordinator.link
    async with gateway(cluster, "g1") as silent:
        await silent.submit_rollouts([asked("a")])
        await link.call("ZINCRBY", "ebbtide:{r}:gateways", -3_700_000, "g1")
        async with gateway(cluster, "g2"):
            fences = await link.call("HKEYS", "ebbtide:{r}:fence")
            assert sorted(name.decode() for name in fences if b"gateway/" in name) == ["lease:gateway/g2"]
        with pytest.raises(LeaseSuperseded):
            await silent.submit_rollouts([asked("b")])
    assert await run.count("requests_submitted") == 1


async def test_the_end_of_a_run_ends_its_requests_and_deletes_them(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1", slots=2)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("done"), asked("running"), asked("waiting")])
        await worker.has("done", "running")
        await worker.add("done", 0, 2, STOP)
        ended = await run.finish()
        assert [ended.counters[f"requests_{name}"] for name in ("submitted", "completed")] == [3, 3]
        with pytest.raises(LeaseSuperseded, match="has ended"):
            await lease.submit_rollouts([asked("late")])
    await wait_until(lambda: not cluster.coordinator.state.ended)
    assert await keys(cluster) == set()


async def test_requests_have_a_timeline_of_their_own(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1")
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("a", sampling=Sampling(max_tokens=4))])
        await worker.has("a")
        await worker.add("a", 0, 4, STOP)
    await run.submit("t")
    await worker.has("t")
    await worker.add("t", 0, 4, STOP)
    for requests, rollout_id in ((True, "a"), (False, "t")):
        call = cluster.runs.ReadTimeline(runs_pb2.ReadTimelineRequest(run_id="r", requests=requests))
        assert [(span.request, span.rollout_id) async for span in call] == [(requests, rollout_id)]


async def test_while_people_ask_a_slot_is_kept_for_the_next_question(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=8)
    await run.submit(*(f"b{number}" for number in range(20)))
    await worker.has(*(f"b{number}" for number in range(8)))
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([asked("i1", interactive=True)])
        await worker.add("b0", 0, 4, STOP)
        await worker.has("i1")  # before the batch rollouts that wait
        await worker.add("i1", 0, 4, STOP)
        rounds = cluster.coordinator.rounds
        await wait_until(lambda: rounds.reserved_slots == 1)
        assert "b8" not in worker.assigned
        await lease.submit_rollouts([asked("i2", interactive=True)])
        await worker.has("i2")
        await worker.add("b1", 0, 4, STOP)
        await worker.has("b8")  # the question has its slot, so no other one is kept
