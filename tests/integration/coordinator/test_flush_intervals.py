"""The workers of a large fleet are told to flush less often, and lose more at most."""

from typing import Any

from prometheus_client import REGISTRY

from ebbtide.v1 import types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
FOLLOWS = {"capabilities": ["flush_interval"], "flush_tokens": 32, "flush_interval_s": 0.25}


async def test_workers_are_told_how_often_a_fleet_of_this_size_may_flush(cluster_with: Any) -> None:
    async with cluster_with(flushes_per_s=2.0) as cluster:
        first = await cluster.worker("w1", **FOLLOWS)
        former = await cluster.worker("w2", flush_tokens=32)
        await wait_until(lambda: 1.0 in first.flush_intervals, what="two workers flush once a second each")
        later = await cluster.worker("w3", **FOLLOWS)
        assert later.attached.flush_interval_s == 1.0, "the answer to its attach says it"
        await wait_until(lambda: first.flush_intervals[-1:] == later.flush_intervals[-1:] == [1.5])
        assert former.flush_intervals == [], "a worker of the former release is told nothing"


async def test_a_lost_worker_that_flushed_less_often_may_have_lost_more(cluster_with: Any) -> None:
    async with cluster_with(flushes_per_s=1.0) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1", **FOLLOWS | {"flush_tokens": 8})
        await wait_until(lambda: 1.0 in worker.flush_intervals)
        await run.submit("a")
        await worker.has("a")
        await worker.break_streams()

        async def lost() -> Any:
            return await run.count("tokens_lost_at_most")

        assert await wait_until(lost, what="the loss is counted") == 32


async def test_with_more_interactive_rollouts_than_keep_50_ms_their_workers_are_told_a_longer_interval(
    cluster_with: Any,
) -> None:
    async with cluster_with(interactive_rollouts=1) as cluster:
        run = await cluster.run()
        worker = await cluster.worker("w1", **FOLLOWS)
        await run.submit("a", "b")
        await run.submit("c", interactive=True)
        await worker.has("a", "b", "c")
        assert [worker.assigned[name].interactive for name in "abc"] == [False, False, True]
        await run.submit("d", interactive=True)
        await wait_until(lambda: worker.interactive_intervals == [0.1])
        assert worker.flush_intervals == [0.0], "batch rollouts keep theirs"
        assert REGISTRY.get_sample_value("ebbtide_coordinator_interactive_rollouts") == 2
        assert REGISTRY.get_sample_value("ebbtide_coordinator_interactive_flush_seconds") == 0.1
        later = await cluster.worker("w2", **FOLLOWS)
        assert later.attached.interactive_flush_s == 0.1
        await worker.add("c", 0, 2, STOP)
        await wait_until(lambda: worker.interactive_intervals == [0.1, 0.0], what="one has ended")
        assert REGISTRY.get_sample_value("ebbtide_coordinator_interactive_flush_seconds") == 0.05
