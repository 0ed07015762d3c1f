"""What a trainer is told of its run's open groups and engines, over a real connection."""

import asyncio
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, LeaseSuperseded, NotFound, NotReady
from ebbtide.types.run import TrainerSpec
from ebbtide.v1 import runs_pb2, types_pb2
from tests.support.waiting import wait_until


async def ask(run: Any, **more: Any) -> Any:
    fields: dict[str, Any] = {"lease": run.lease, "groups": 10} | more
    return await run.cluster.call(run.cluster.runs.ReadWorkLeft, runs_pb2.ReadRemainingWorkRequest(**fields))


async def test_groups_are_told_as_they_run_and_end(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", slots=2)
    await run.submit("a", "b", group_id="g1")
    await run.submit("c", group_id="g2")
    await worker.has("a", "b")
    await worker.add("a", 0, 3)
    (first, second) = (await ask(run)).groups
    assert (first.prompt, list(first.running), list(first.waiting)) == (3, [3], [0])
    assert list(second.waiting) == [0]
    await worker.add("a", 3, 2, 1)
    await wait_until(lambda: _finished(run), what="the response has ended")
    left = await ask(run, groups=1)
    assert (list(left.groups[0].running), list(left.groups[0].waiting)) == ([], [0])
    assert (left.open, list(left.engines), list(left.spot)) == (1, ["w1"], [True])


async def _finished(run: Any) -> bool:
    left = await ask(run)
    return not left.groups[0].running


async def test_a_call_waits_until_an_engine_comes(cluster: Any) -> None:
    run = await cluster.run()
    await cluster.worker("w1")

    async def settled() -> bool:
        left = await ask(run)
        return list(left.versions) == [1]

    await wait_until(settled, what="w1 has the version")
    first = await ask(run)
    waiting = asyncio.create_task(ask(run, fleet=first.fleet, wait_s=8.0))
    await asyncio.sleep(0)
    await cluster.worker("w2")
    assert sorted((await waiting).engines) == ["w1", "w2"]


async def test_only_a_trainers_lease_asks(cluster: Any) -> None:
    run = await cluster.run()
    trainer = run.lease
    await run.claim("driver", "driver")
    with pytest.raises(InvalidRequest):
        await ask(run)
    run.lease = trainer
    assert (await ask(run)).open == 0


async def test_of_a_run_that_is_over_nothing_is_told(cluster: Any) -> None:
    run = await cluster.run()
    await run.finish()
    with pytest.raises(LeaseSuperseded):
        await ask(run)


async def release(run: Any, worker_id: str) -> None:
    request = runs_pb2.ReleaseWorkerRequest(lease=run.lease, worker_id=worker_id)
    await run.cluster.call(run.cluster.runs.ReleaseWorker, request)


async def test_a_run_has_its_own_spot_workers_leave_and_no_others(cluster: Any) -> None:
    run = await cluster.run(trainer=TrainerSpec(streaming=True, releases=True))
    worker = await cluster.worker("w1")
    await cluster.worker("reserved", kind=types_pb2.WORKER_KIND_RESERVED)
    await wait_until(lambda: _serves(cluster, "w1", "reserved"), what="both serve the run")
    with pytest.raises(NotReady, match="no spot worker"):
        await release(run, "reserved")
    with pytest.raises(NotFound):
        await release(run, "nobody")
    await release(run, "w1")
    await wait_until(lambda: worker.drains, what="it is asked to leave")
    assert list((await ask(run)).engines) == ["reserved"]
    await cluster.run("other")
    with pytest.raises(NotReady, match="other runs"):
        await release(run, "w1")


async def test_a_run_that_keeps_its_workers_has_none_leave(cluster: Any) -> None:
    run = await cluster.run()
    await cluster.worker("w1")
    await wait_until(lambda: _serves(cluster, "w1"), what="it serves the run")
    with pytest.raises(NotReady, match=r"set trainer\.releases"):
        await release(run, "w1")


def _serves(cluster: Any, *names: str) -> bool:
    serving = {one.worker_id for one in cluster.coordinator.state.serving("r")}
    return serving.issuperset(names)
