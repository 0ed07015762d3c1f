"""A client that gives up its calls costs a write each at most: runs are not read again, and the leader stays leader."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ebbtide.coordinator import metrics
from ebbtide.store.records import OpenRollout
from ebbtide.v1 import rollouts_pb2, runs_pb2, types_pb2
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

QUEUED = 2000
DEADLINES_S = (0.0005, 0.001, 0.002, 0.004)


class Reads:
    """Counts how often each run is read from the store."""

    def __init__(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = Counter[str]()
        self._read = cluster.coordinator.store.rollouts.open_rollouts
        monkeypatch.setattr(cluster.coordinator.store.rollouts, "open_rollouts", self._counted)

    async def _counted(self, run_id: str) -> AsyncIterator[OpenRollout]:
        self.of[run_id] += 1
        async for row in self._read(run_id):
            yield row


@pytest.fixture
def lapses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the gauge of leadership was set to after the start."""
    found: list[float] = []
    monkeypatch.setattr(metrics.leads, "set", found.append)
    return found


async def fill(run: Any, count: int) -> None:
    for first in range(0, count, 500):
        await run.submit(*(f"q{number}" for number in range(first, min(count, first + 500))))


async def given_up(call: Any, request: Any, timeout: float) -> bool:
    """Whether a call ended by its deadline."""
    try:
        await call(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return True
    return False


def submission(run: Any, *rollout_ids: str) -> rollouts_pb2.SubmitRequest:
    return rollouts_pb2.SubmitRequest(lease=run.lease, rollouts=[run.request(name) for name in rollout_ids])


async def test_a_submit_is_carried_out_though_its_client_left_in_the_middle(
    cluster: Any, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await cluster.run()
    reads = Reads(cluster, monkeypatch)
    mirror = cluster.coordinator.state.runs["r"]
    redis_server.freeze()
    try:
        assert await given_up(cluster.rollouts.Submit, submission(run, "a", "b"), 0.3)
    finally:
        redis_server.thaw()
    await wait_until(lambda: len(mirror.queue) == 2, what="both rollouts are queued")
    worker = await cluster.worker("w1")
    await wait_until(lambda: worker.assigned.keys() == {"a", "b"}, what="both rollouts are placed")
    assert not reads.of


async def test_calls_that_wait_for_their_turn_leave_nothing_behind(
    cluster: Any, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await cluster.run()
    reads = Reads(cluster, monkeypatch)
    redis_server.freeze()
    try:
        calls = [given_up(cluster.rollouts.Submit, submission(run, f"a{number}"), 0.5) for number in range(50)]
        assert all(await asyncio.gather(*calls))
        # One write is under way; the other calls gave up before theirs began.
        await wait_until(lambda: cluster.coordinator.writes.under_way <= 1, what="those that waited have left")
    finally:
        redis_server.thaw()
    await wait_until(lambda: not cluster.coordinator.writes.under_way, what="the write has ended")
    assert await run.count("submitted") == 1
    assert len(cluster.coordinator.state.runs["r"].queue) == 1
    assert not reads.of


async def test_a_loop_of_tiny_deadlines_has_no_run_read_again_and_deposes_nobody(
    cluster: Any, lapses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = await cluster.run(), await cluster.run("other")
    await fill(run, QUEUED)
    reads = Reads(cluster, monkeypatch)
    mirror = cluster.coordinator.state.runs["r"]
    left, known, draw = 0, set[str](), random.Random(7)
    number = 0
    while left < 150:
        names = [f"a{number}.{i}" for i in range(32)]
        known.update(names)
        dropped = rollouts_pb2.CancelRequest(lease=run.lease, rollout_ids=names[:16])
        episode = rollouts_pb2.Episode(episode_id=f"e{number}", rollout_ids=names[16:24], drop_reason="late")
        ended = rollouts_pb2.CompleteEpisodesRequest(lease=run.lease, episodes=[episode])
        for call, request in (
            (cluster.rollouts.Submit, submission(run, *names)),
            (cluster.rollouts.Cancel, dropped),
            (cluster.rollouts.CompleteEpisodes, ended),
        ):
            try:
                left += await given_up(call, request, draw.choice(DEADLINES_S))
            except grpc.aio.AioRpcError as error:  # it names rollouts whose submit came too late
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017
        number += 1
    await wait_until(lambda: not cluster.coordinator.writes.under_way, what="all writes have ended")
    assert await other.submit("there") == [1]
    open_rollouts = {row.request.rollout_id async for row in cluster.coordinator.store.rollouts.open_rollouts("other")}
    assert open_rollouts == {"there"}
    assert reads.of == {"other": 1}
    stored = {row.request.rollout_id async for row in cluster.coordinator.store.rollouts.open_rollouts("r")}
    assert stored == {one.rollout_id for one in mirror.queue}
    assert not lapses
    assert not cluster.coordinator.link.superseded.is_set()


async def test_a_run_whose_submit_was_given_up_is_there_and_counts(
    cluster_with: Any, redis_server: EmbeddedRedis
) -> None:
    async with cluster_with(max_runs_per_user=1) as cluster:
        first = await cluster.run()
        await first.finish(types_pb2.RUN_STATUS_FAILED)
        spec = (await first.get()).spec
        redis_server.freeze()
        try:
            request = runs_pb2.SubmitRunRequest(run_id="late", spec=spec)
            assert await given_up(cluster.runs.SubmitRun, request, 0.3)
        finally:
            redis_server.thaw()
        await wait_until(lambda: "late" in cluster.coordinator.state.runs, what="the run is known")
        again = runs_pb2.SubmitRunRequest(run_id="another", spec=spec)
        with pytest.raises(grpc.aio.AioRpcError, match="max_runs_per_user"):
            await cluster.runs.SubmitRun(again, timeout=10)
