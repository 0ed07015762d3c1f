"""Workers of one run that differ in speed and in memory."""

from collections import Counter
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2
from tests.integration.coordinator.test_moves import paced
from tests.support.waiting import wait_until

RESERVED = types_pb2.WorkerKind.ValueType(WorkerKind.RESERVED)


def engine(**more: Any) -> fleet_pb2.EngineInfo:
    return fleet_pb2.EngineInfo(model="m", vocab_size=1000, max_model_len=256, **more)


async def listed(cluster: Any) -> dict[str, fleet_pb2.Worker]:
    stub = fleet_pb2_grpc.FleetStub(cluster.channel)
    found = await cluster.call(stub.ListWorkers, fleet_pb2.ListWorkersRequest())
    return {worker.worker_id: worker for worker in found.workers}


async def begun(cluster: Any, workers: list[Any], names: list[str]) -> Counter[str]:
    """Have each rollout begin at the worker that gets it. How many each one got."""
    began = set[str]()

    def all_there() -> bool:
        return all(any(name in worker.assigned for worker in workers) for name in names)

    await wait_until(all_there, what=f"{names} are assigned")
    found = Counter[str]()
    for worker in workers:
        mine = [name for name in names if name in worker.assigned and name not in began]
        if mine:
            await worker.send(*(worker.delta(name, 0, 1) for name in mine))
        found[worker.worker_id] = len(mine)
        began.update(mine)
    return found


async def test_of_two_workers_with_speeds_of_one_to_three_the_fast_one_gets_three_times_as_many(cluster: Any) -> None:
    run = await cluster.run()
    slow = await cluster.worker("slow", slots=32, kind=RESERVED, engine=engine(device="slow"))
    fast = await cluster.worker("fast", slots=32, kind=RESERVED, engine=engine(device="fast"))
    sessions = cluster.coordinator.state.sessions
    await wait_until(lambda: all(one.installed for one in sessions.values()), what="both have the weights")
    names = [f"a{number}" for number in range(8)]
    await run.submit(*names)
    assert await begun(cluster, [slow, fast], names) == {"slow": 4, "fast": 4}  # nothing is known of either
    await paced(cluster, slow, 4 * 30)
    await paced(cluster, fast, 4 * 90)
    workers = await listed(cluster)
    assert 2.5 < workers["fast"].rollout_tokens_per_s / workers["slow"].rollout_tokens_per_s < 3.5
    total = Counter(slow=4, fast=4)
    for lot in range(4):
        names = [f"b{lot}.{number}" for number in range(6)]
        await run.submit(*names)
        total += await begun(cluster, [slow, fast], names)
    assert 2.4 < total["fast"] / total["slow"] < 3.6


async def test_a_worker_offers_what_its_memory_holds_and_the_rest_waits_for_others(cluster: Any) -> None:
    small = await cluster.worker("small", slots=32, engine=engine(kv_tokens=500))
    small.beats()
    run = await cluster.run()
    sessions = cluster.coordinator.state.sessions
    await wait_until(lambda: all(one.installed and one.slots < 32 for one in sessions.values()), what="it offers fewer")
    names = [f"r{number}" for number in range(12)]
    await run.submit(*names)
    await wait_until(lambda: small.assigned, what="it gets some")
    await begun(cluster, [small], list(small.assigned))
    worker = (await listed(cluster))["small"]
    assert worker.slots == 32
    assert 0 < worker.offered_slots < 12
    large = await cluster.worker("large", slots=32, engine=engine(kv_tokens=1_000_000))
    await wait_until(lambda: len(small.assigned) + len(large.assigned) == 12, what="the other one takes the rest")
    assert len(large.assigned) > len(small.assigned)
    assert (await listed(cluster))["large"].offered_slots == 32


async def test_a_longer_context_that_comes_late_is_that_of_later_rollouts_and_the_run_says_so(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1", slots=1)
    await run.submit("a")
    await first.has("a")
    assert first.assigned["a"].max_model_len == 256
    longer = engine()
    longer.max_model_len = 512
    second = await cluster.worker("w2", engine=longer)
    (event,) = await run.events("warning", 1)
    assert "end at 512 tokens" in event.message
    assert "set the run's max_model_len" in event.message
    await second.break_streams()
    await first.add("a", 0, 1, types_pb2.FINISH_REASON_STOP)
    await run.submit("b")
    await first.has("b")
    assert first.assigned["b"].max_model_len == 512, "who is attached decides no response's length"


async def test_a_worker_with_a_longer_context_that_left_is_waited_for_and_the_run_says_so(
    cluster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ebbtide.coordinator.dispatch.unserved_work._LONGER_GRACE_S", 0.1)
    monkeypatch.setattr("ebbtide.coordinator.dispatch.dispatch_round._MEASURE_EVERY_S", 0.1)
    monkeypatch.setattr("ebbtide.coordinator.fleet.worker_registry._LOST_KEPT_S", 0.0)
    longer = engine()
    longer.max_model_len = 512
    run, long = await cluster.run(), await cluster.worker("long", engine=longer)
    await run.submit("a", prompt_ids=pack_ids([1] * 300))
    await long.has("a")
    short = await cluster.worker("short")
    await long.break_streams()
    (event,) = await run.events("warning", 1)
    assert "1 rollouts fill the longest attached (256)" in event.message
    assert "max_model_len to the run's (512)" in event.message
    await wait_until(lambda: len(cluster.coordinator.fleet.workers()) == 1, what="the lost one is forgotten")
    await run.submit("b", prompt_ids=pack_ids([1] * 300))  # such as the next turn of an episode
    again = await cluster.worker("long", engine=longer)
    await again.has("a", "b")
    assert await run.count("dead_lettered") == 0
    assert short.assigned == {}


async def test_a_runs_own_context_is_that_of_each_of_its_rollouts(cluster: Any) -> None:
    run, worker = await cluster.run(max_model_len=128), await cluster.worker("w1")
    await run.submit("a")
    await worker.has("a")
    assert worker.assigned["a"].max_model_len == 128
    with pytest.raises(InvalidRequest, match="in the run's context"):
        await run.submit("b", prompt_ids=pack_ids([1] * 128))


async def test_what_fills_the_contexts_of_a_runs_workers_gets_another_that_it_would_not_need_else(cluster: Any) -> None:
    run, first = await cluster.run(), await cluster.worker("w1")
    await run.submit("a", sampling=Sampling(max_tokens=1000))
    await first.has("a")
    await first.add("a", 0, 253)
    (session,) = cluster.coordinator.state.sessions.values()
    await wait_until(lambda: session.run_id == "r" and not cluster.coordinator.state.runs["r"].queue)
    longer = engine()
    longer.max_model_len = 512
    cluster.coordinator.state.changes.learn("w2", 1.0)  # so long a change is not worth a single rollout's rest
    second = await cluster.worker("w2", engine=longer)
    await first.hand_back("a", cause=types_pb2.END_CAUSE_SHORT_CONTEXT)
    await second.has("a")
    assert len(second.assigned["a"].partial) == 253 * 12
