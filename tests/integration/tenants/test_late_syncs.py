"""A store that syncs late: calls that wait for its disk keep no turn and no lock, so a user's own leases last."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import pytest

from ebbtide.errors import StoreUnavailable
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.v1 import runs_pb2, types_pb2
from ebbtide.wire import to_proto
from tests.integration.tenants.test_limits import Gated
from tests.support.waiting import wait_until


class LateSyncs(AbstractAsyncContextManager["LateSyncs"]):
    """Meanwhile Redis leaves its syncs to the kernel: nothing is durable for half a minute."""

    def __init__(self, block: Any) -> None:
        self._link = block.cluster.coordinator.link
        self._before_wait, self.waiting = self._link.before_wait, 0
        self._link.before_wait = self._count

    def _count(self) -> None:
        self.waiting += 1
        self._before_wait()

    async def __aenter__(self) -> "LateSyncs":
        await self._set("no", at_once=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._set("always", at_once=True)

    async def _set(self, fsync: str, *, at_once: bool) -> None:
        await self._link.call("CONFIG", "SET", "appendfsync", fsync)
        self._link.durability.look_soon()
        await wait_until(lambda: self._link.durability.horizon.at_once is at_once, what=f"appendfsync {fsync} is known")


def submissions(caller: Any, run_ids: Sequence[str]) -> list["asyncio.Task[Any]"]:
    spec = to_proto(RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e")), types_pb2.RunSpec)
    requests = [runs_pb2.SubmitRunRequest(run_id=run_id, spec=spec) for run_id in run_ids]
    return [asyncio.create_task(caller.call(caller.runs.SubmitRun, request)) for request in requests]


async def test_calls_that_wait_for_the_disk_leave_their_turns_to_others(block_with: Any) -> None:
    async with block_with(calls_per_user=2) as block:
        run = await block.greedy.run("greedy")
        async with LateSyncs(block) as late:
            reserve, known = block.greedy.runs.ReserveVersion, runs_pb2.GetRunRequest(run_id="greedy")
            calls = [asyncio.create_task(block.greedy.call(reserve, run.lease)) for _ in range(4)]
            await wait_until(lambda: late.waiting == 4, what="all wait for the disk")
            assert (await block.greedy.call(block.greedy.runs.GetRun, known)).run_id == "greedy"
            assert not any(call.done() for call in calls)
        assert len({reserved.version for reserved in await asyncio.gather(*calls)}) == 4


async def test_leases_are_renewed_and_released_while_all_turns_are_taken(
    block_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with block_with(calls_per_user=2) as block:
        await block.greedy.run("busy")
        run = await block.greedy.run("greedy")
        gated = Gated(block, "busy", monkeypatch)
        request = runs_pb2.GetRunRequest(run_id="busy")
        calls = [asyncio.create_task(block.greedy.call(block.greedy.runs.GetRun, request)) for _ in range(4)]
        await wait_until(lambda: gated.inside == 2, what="all turns are taken")
        renewed = await block.greedy.call(block.greedy.runs.RenewLease, run.lease)
        assert renewed.ref == run.lease
        await block.greedy.call(block.greedy.runs.ReleaseLease, run.lease)
        assert gated.inside == 2
        gated.open.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize("named", [True, False])
async def test_submits_of_runs_wait_for_the_disk_side_by_side(block_with: Any, *, named: bool) -> None:
    async with block_with(calls_per_user=1) as block:
        caller, run_ids = block.greedy if named else block.cluster, {"a", "b", "c"}
        async with LateSyncs(block):
            calls = submissions(caller, sorted(run_ids))
            await wait_until(lambda: block.cluster.coordinator.state.runs.keys() == run_ids, what="all are stored")
            assert not any(call.done() for call in calls)
        assert {run.run_id for run in await asyncio.gather(*calls)} == run_ids


async def test_submits_without_a_name_do_not_wait_for_each_other(
    block_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with block_with() as block:
        gated = Gated(block, "a", monkeypatch)
        calls = submissions(block.cluster, ["a", "b"])
        await wait_until(lambda: gated.inside == 1, what="one is in the middle")
        assert (await calls[1]).run_id == "b"
        assert not calls[0].done()
        gated.open.set()
        assert (await calls[0]).run_id == "a"


async def test_a_submit_that_the_store_forgot_before_it_was_durable_is_asked_again(block_with: Any) -> None:
    async with block_with() as block:
        link = block.cluster.coordinator.link
        former = link.incarnation
        await link.durable(former)
        link.incarnation = "another"
        with pytest.raises(StoreUnavailable, match="came back"):
            await link.durable(former)
