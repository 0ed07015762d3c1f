"""One user at each limit of the coordinator: the limit answers by name, and another user works as usual."""

import asyncio
from typing import Any

import grpc
import pytest

from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.v1 import rollouts_pb2, runs_pb2
from tests.integration.tenants.conftest import ACCEPTED
from tests.support.waiting import wait_until

READERS = 240


async def report(run: Any, *keys: str, kind: str = "step", size: int = 0) -> None:
    events = [runs_pb2.RunEvent(kind=kind, key=key, message="m" * size) for key in keys]
    await run.cluster.call(run.cluster.runs.Report, runs_pb2.ReportRequest(lease=run.lease, events=events))


async def test_a_user_with_all_runs_that_are_allowed(block_with: Any) -> None:
    async with block_with(max_runs_per_user=3) as block:
        runs = [await block.greedy.run(f"greedy-{number}") for number in range(3)]
        with pytest.raises(NoCapacity, match=r"user greedy has 3 live runs.*max_runs_per_user") as refused:
            await block.greedy.run("greedy-4")
        assert refused.value.retry_after_s > 0
        await block.other_works()
        await runs[0].finish()
        await block.greedy.run("greedy-4")


async def test_a_user_with_a_full_queue(block_with: Any) -> None:
    async with block_with(max_open=256) as block:
        run = await block.greedy.run("greedy", version=False)
        await run.submit(*(f"g{number}" for number in range(256)))
        with pytest.raises(NoCapacity, match="of 256 places in its queue") as refused:
            await run.submit("more")
        assert refused.value.retry_after_s > 0
        await block.other_works()
        await run.cancel("g0")
        assert await run.submit("more") == [ACCEPTED]


async def test_a_user_with_a_full_quota(block_with: Any) -> None:
    async with block_with() as block:
        run = await block.greedy.run("greedy", version=False, quota_bytes=1 << 20)
        prompt = bytes(160_000)
        rollouts = [run.request(f"g{number}", prompt_ids=prompt) for number in range(7)]
        with pytest.raises(InvalidRequest, match="quota_bytes") as invalid:
            await run.send(*rollouts)
        assert invalid.value.field
        assert run.lease.fence
        await block.other_works()


async def test_a_user_whose_run_fills_its_quota_with_events(block_with: Any) -> None:
    async with block_with() as block:
        run = await block.greedy.run("greedy", quota_bytes=1 << 20)
        with pytest.raises(NoCapacity, match="fill its quota_bytes"):
            await report(run, *(f"k{number}" for number in range(1500)), size=1000)
        await block.other_works()
        # What goes when it is old is taken, though facts fill the quota.
        await report(run, "a", "b", kind="note")


async def test_a_large_report_is_stored_whole_and_in_order(block_with: Any) -> None:
    async with block_with() as block:
        run = await block.greedy.run("greedy")
        keys = [f"k{number}" for number in range(500)]
        await report(run, *keys)
        await report(run, *keys)  # its answer was lost
        assert [event.key for event in await run.events("step", 500)] == keys
        await block.other_works()


async def test_a_user_with_many_readers_at_all_streams_of_a_connection(block_with: Any) -> None:
    async with block_with(serving={"max_streams": READERS}) as block:
        greedy, watching = block.greedy, block.tenant("greedy")
        run = await greedy.run("greedy")
        seen = [0] * READERS
        kinds = (
            lambda: watching.runs.WatchRun(runs_pb2.WatchRunRequest(run_id="greedy")),
            lambda: watching.rollouts.WatchFinished(rollouts_pb2.WatchFinishedRequest(run_id="greedy")),
            lambda: watching.rollouts.WatchTrajectories(rollouts_pb2.WatchTrajectoriesRequest(run_id="greedy")),
        )

        async def read(number: int) -> None:
            async for _ in kinds[number % 3]():
                seen[number] += 1

        readers = [asyncio.create_task(read(number)) for number in range(READERS)]
        try:
            await wait_until(lambda: all(seen[::3]), what="all watchers read")
            await report(run, "news")
            with pytest.raises(grpc.aio.AioRpcError) as late:  # no stream is left on this connection
                await watching.runs.GetRun(runs_pb2.GetRunRequest(run_id="greedy"), timeout=0.3)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await block.other_works()
            before = list(seen)
            await report(run, "more")
            await wait_until(lambda: all(now > was for now, was in zip(seen[::3], before[::3], strict=True)))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


class Gated:
    """Holds the reads of one run back until the test opens the gate, and counts them."""

    def __init__(self, block: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.inside, self.most = asyncio.Event(), 0, 0
        runs = block.cluster.coordinator.store.runs
        read = runs.read

        async def held(name: str) -> Any:
            if name == run_id:
                self.inside += 1
                self.most = max(self.most, self.inside)
                await self.open.wait()
                self.inside -= 1
            return await read(name)

        monkeypatch.setattr(runs, "read", held)


async def test_a_user_with_many_requests_at_once(block_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with block_with(calls_per_user=3) as block:
        await block.greedy.run("greedy")
        await block.other_works()
        gated = Gated(block, "greedy", monkeypatch)
        request = runs_pb2.GetRunRequest(run_id="greedy")
        calls = [asyncio.create_task(block.greedy.call(block.greedy.runs.GetRun, request)) for _ in range(200)]
        await wait_until(lambda: gated.inside == 3, what="as many are worked on as may be")
        await block.other_works()
        assert gated.inside == 3
        for call in calls[100:]:
            call.cancel()
        gated.open.set()
        assert {run.run_id for run in await asyncio.gather(*calls[:100])} == {"greedy"}
        assert gated.most == 3


async def test_calls_without_a_name_are_not_bounded(block_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with block_with(calls_per_user=3) as block:
        await block.cluster.run("shared")
        gated = Gated(block, "shared", monkeypatch)
        request = runs_pb2.GetRunRequest(run_id="shared")
        calls = [asyncio.create_task(block.cluster.call(block.cluster.runs.GetRun, request)) for _ in range(50)]
        await wait_until(lambda: gated.inside == 50, what="all are worked on")
        gated.open.set()
        await asyncio.gather(*calls)


async def test_a_user_who_gives_all_calls_up(block_with: Any) -> None:
    async with block_with() as block:
        run = await block.greedy.run("greedy", version=False)
        left, number = 0, 0
        while left < 50:
            number += 1
            names = [run.request(f"g{number}.{index}") for index in range(16)]
            request = rollouts_pb2.SubmitRequest(lease=run.lease, rollouts=names)
            try:
                await block.greedy.rollouts.Submit(request, timeout=0.001)
            except grpc.aio.AioRpcError as error:
                left += error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await block.other_works()
