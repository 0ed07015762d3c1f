"""What clients and workers send that cannot be: refused by field, and nobody else notices."""

import asyncio
import math
from typing import Any

import grpc
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rpc.channel import write
from ebbtide.rpc.status_table import translated
from ebbtide.types.fleet import PROTOCOL_VERSION, AppendStatus, EndCause
from ebbtide.types.run import EnvironmentSpec, RunEvent, RunSpec, Sampling
from ebbtide.v1 import fleet_pb2, rollouts_pb2, runs_pb2, types_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub
from ebbtide.wire import to_proto
from tests.support.waiting import wait_until


async def test_a_spec_too_large_to_be_listed_with_others_is_refused_by_field(cluster: Any) -> None:
    spec = to_proto(RunSpec(name="n", model="m" * 100_000, environment=EnvironmentSpec(name="e")), types_pb2.RunSpec)
    with pytest.raises(InvalidRequest, match="model: more than"):
        await cluster.call(cluster.runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id="r", spec=spec))
    assert not (await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())).runs


async def test_a_cursor_beyond_what_the_store_counts_is_refused_by_field(cluster: Any) -> None:
    run = await cluster.run()
    request = rollouts_pb2.WatchFinishedRequest(run_id=run.run_id, cursor=f"{1 << 64}-0")
    with pytest.raises(InvalidRequest, match=r"^cursor: "), translated("coordinator"):
        await cluster.rollouts.WatchFinished(request).read()
    with pytest.raises(InvalidRequest, match=r"outcomes\[0\].cursor"):
        await run.commit(f"0-{1 << 64}")


async def test_a_status_that_there_is_not_ends_no_run(cluster: Any) -> None:
    run = await cluster.run()
    with pytest.raises(InvalidRequest, match="status: must be FINISHED or FAILED"):
        await run.finish(99)
    assert (await run.get()).status == types_pb2.RUN_STATUS_RUNNING


async def test_an_event_too_large_to_be_held_for_slow_watchers_is_refused_by_field(cluster: Any) -> None:
    run = await cluster.run()
    events = [runs_pb2.RunEvent(kind="step"), runs_pb2.RunEvent(kind="step", message="m" * 100_000)]
    with pytest.raises(InvalidRequest, match=r"events\[1\]: more than"):
        await cluster.call(cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"site": "s" * 1000}, "attach.site"),
        (
            {
                "held": [
                    fleet_pb2.HeldAttempt(attempt=fleet_pb2.AttemptRef(run_id="r", rollout_id="a", attempt_id="x:7"))
                ]
            },
            r"attach.held\[0\].attempt.attempt_id",
        ),
        ({"installed": [types_pb2.PolicyVersion(policy="p" * 1000)]}, r"attach.installed\[0\].policy"),
        ({"installed": [types_pb2.PolicyVersion(policy="p", root=bytes(1000))]}, r"attach.installed\[0\].root"),
    ],
)
async def test_a_worker_whose_words_would_fill_the_listing_is_refused_by_field(
    cluster: Any, said: Any, field: str
) -> None:
    attach = fleet_pb2.Attach(
        worker_id="w1", kind=types_pb2.WORKER_KIND_SPOT, protocol_version=PROTOCOL_VERSION, slots=1,
        engine=fleet_pb2.EngineInfo(model="m", vocab_size=9, max_model_len=9), **said,
    )  # fmt: skip
    stub = FleetStub(cluster.channel)
    control: Any = stub.Control()
    await write(control, fleet_pb2.WorkerMessage(attach=attach))
    with pytest.raises(InvalidRequest, match=field), translated("coordinator"):
        await control.read()
    assert not (await cluster.call(stub.ListWorkers, fleet_pb2.ListWorkersRequest())).workers


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"uptime_s": math.nan}, r"heartbeat\.uptime_s"),
        ({"tokens_per_s": math.inf}, r"heartbeat\.tokens_per_s"),
        ({"quiet_s": -1.0}, r"heartbeat\.quiet_s"),
        ({"uptime_s": 1e10}, r"heartbeat\.uptime_s"),
        ({"tokens_generated": 1 << 63}, r"heartbeat\.tokens_generated"),
        ({"busy_s": 9.0, "uptime_s": 2.0}, "busy_s is more than uptime_s"),
        ({"state": types_pb2.WORKER_STATE_LOST}, "state is not a worker's to say"),
    ],
)
async def test_a_heartbeat_that_cannot_be_ends_its_workers_stream_and_nobody_elses(
    cluster: Any, said: Any, field: str
) -> None:
    liar, other = await cluster.worker("liar"), await cluster.worker("other")
    await liar.beat(**said)
    await wait_until(lambda: liar.ended, what="the liar's stream has ended")
    with pytest.raises(InvalidRequest, match=field):
        raise liar.ended
    run = await cluster.run()
    await run.submit("a")
    await other.has("a")


async def test_an_attempt_that_is_no_id_ends_its_workers_stream_and_spoils_nobody_elses_tokens(cluster: Any) -> None:
    run, workers = await cluster.run(), [await cluster.worker(name, slots=1) for name in ("liar", "other")]
    await run.submit("a", "b")
    await wait_until(lambda: all(worker.assigned for worker in workers))
    liar, other = workers
    lies, held = (next(iter(worker.assigned)) for worker in workers)
    message = liar.message(liar.delta(lies, 0, 3))
    message.opened[0].attempt.attempt_id += ":7"
    refused = asyncio.ensure_future(liar.exchange(message))
    ack = await other.add(held, 0, 3)
    with pytest.raises(InvalidRequest, match=r"opened\[0\].attempt.attempt_id"):
        await refused
    assert (ack.status, ack.stored) == (AppendStatus.STORED, 3)
    assert (await other.add(held, 3, 2)).stored == 5
    assert await run.count("tokens_stored") == 5


async def test_a_worker_may_leave_with_a_long_reason_which_is_cut(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    stub, long = FleetStub(cluster.channel), "\u00e4" * 1_900_000  # of two bytes each
    await worker.say(draining=fleet_pb2.Draining(deadline_s=9.0, reason=f"reclaim {long}"))
    version = types_pb2.PolicyVersion(policy="policy", version=1)
    await worker.say(install_failed=fleet_pb2.InstallFailed(version=version, run_id="r", message=long))
    await worker.hand_back("a", cause=EndCause.WORKER_LEAVES, reason=f"shutdown {long}")
    (warning,) = await run.events("warning", 1)
    (told,) = [one for one in await run.events("worker", 2) if one.labels["state"] == "draining"]
    (listed,) = (await cluster.call(stub.ListWorkers, fleet_pb2.ListWorkersRequest())).workers
    assert listed.reason.startswith("reclaim \u00e4")
    for text in (listed.reason, told.message, warning.message):
        assert 1000 < len(text.encode()) < 1200
        assert text.endswith(" ...")
    assert worker.ended is None


async def test_a_run_whose_trainer_failed_at_length_can_be_listed_and_watched(cluster: Any) -> None:
    run = await cluster.run()
    request = runs_pb2.FinishRunRequest(lease=run.lease, status=types_pb2.RUN_STATUS_FAILED, message="m" * 4_000_000)
    await cluster.call(cluster.runs.FinishRun, request)
    (listed,) = (await cluster.call(cluster.runs.ListRuns, runs_pb2.ListRunsRequest())).runs
    events = await run.events("status", 3)
    assert len(listed.message) == len(events[-1].message) == 1024


async def test_the_coordinators_own_events_are_no_larger_than_others(cluster: Any) -> None:
    run = await cluster.run()
    event = RunEvent(kind="warning", key="k" * 128, message="\u20ac" * 100_000, labels={"worker": "w" * 128})
    await cluster.coordinator.store.events.note(run.run_id, event)
    (told,) = await run.events("warning", 1)
    assert 31_000 < told.ByteSize() <= 32 << 10


async def test_the_listing_arrives_however_many_workers_came_and_went(cluster: Any) -> None:
    engine = fleet_pb2.EngineInfo(
        model="m" * 4096, vocab_size=9, max_model_len=9, eos_token_ids=range(1024), architecture="a" * 128
    )
    installed = [types_pb2.PolicyVersion(policy="p" * 128, version=one + 1, root=bytes(32)) for one in range(64)]
    stub, channel = FleetStub(cluster.channel), cluster.new_channel()

    async def come_and_go(number: int) -> None:
        attach = fleet_pb2.Attach(
            worker_id=f"spot{number}", kind=types_pb2.WORKER_KIND_SPOT, protocol_version=PROTOCOL_VERSION, slots=1,
            engine=engine, installed=installed, site="s" * 128,
        )  # fmt: skip
        control: Any = FleetStub(channel).Control()
        await write(control, fleet_pb2.WorkerMessage(attach=attach))
        await control.read()
        await control.done_writing()
        while await control.read() is not grpc.aio.EOF:
            pass

    async def names() -> set[str]:
        listed = await cluster.call(stub.ListWorkers, fleet_pb2.ListWorkersRequest())
        return {worker.worker_id for worker in listed.workers}

    for start in range(0, 400, 40):
        await asyncio.gather(*(come_and_go(number) for number in range(start, start + 40)))
    found = await names()
    assert len(found) == 256
    assert {f"spot{number}" for number in range(160, 400)} <= found
    await come_and_go(300)
    await asyncio.gather(*(come_and_go(number) for number in range(400, 600)))
    assert "spot300" in await names()  # it was lost again lately


async def test_rollouts_with_many_stop_strings_are_assigned_in_messages_that_arrive(cluster: Any) -> None:
    run = await cluster.run()
    sampling = Sampling(max_tokens=8, stop=tuple(chr(0x10000 + number) * 128 for number in range(128)))
    names = [f"r{number}" for number in range(120)]  # 64 KiB each
    for start in range(0, len(names), 40):
        await run.submit(*names[start : start + 40], sampling=sampling)
    worker = await cluster.worker("w1", slots=4 * len(names))  # a quarter of which may wait for their first token
    await worker.has(*names)
