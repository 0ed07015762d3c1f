"""Serves `ebbtide.v1.Runs`."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from ebbtide.auth.admission import caller_name, check_claim
from ebbtide.coordinator.api.request_checks import check_cursor, check_lease
from ebbtide.coordinator.api.run_service import RunService
from ebbtide.coordinator.api.work_left_reader import WorkLeftReader
from ebbtide.coordinator.servicers.list_page import ListPage
from ebbtide.coordinator.servicers.record_lists import records_from_proto
from ebbtide.errors import InvalidRequest
from ebbtide.types.ids import check_id
from ebbtide.types.run import LeaseRef, Run, RunEvent, RunSpec, RunStatus
from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire.record_conversion import from_proto, to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Runs"


class RunsServicer(runs_pb2_grpc.RunsServicer):
    def __init__(self, runs: RunService, work: WorkLeftReader, *, lease_ttl_s: float) -> None:
        self._runs, self._work, self._ttl_s = runs, work, lease_ttl_s

    async def SubmitRun(self, request: runs_pb2.SubmitRunRequest, context: Context) -> runs_pb2.Run:
        spec = from_proto(request.spec, RunSpec, field="spec")
        return to_proto(await self._runs.submit(request.run_id, spec, caller_name()), runs_pb2.Run)

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: Context) -> runs_pb2.Run:
        return to_proto(await self._runs.get(request.run_id), runs_pb2.Run)

    async def ListRuns(self, request: runs_pb2.ListRunsRequest, context: Context) -> runs_pb2.ListRunsResponse:
        page = ListPage(runs_pb2.Run, request.page_size)
        async with aclosing(self._runs.list(request.cursor, newest_first=not request.page_size)) as runs:
            async for cursor, run in runs:
                if not page.add(cursor, run):
                    break
        if request.page_size:
            return runs_pb2.ListRunsResponse(runs=page.messages, next=page.next)
        return runs_pb2.ListRunsResponse(runs=page.messages[::-1])

    async def CancelRun(self, request: runs_pb2.CancelRunRequest, context: Context) -> runs_pb2.Run:
        return to_proto(await self._runs.cancel(request.run_id), runs_pb2.Run)

    async def WatchRun(self, request: runs_pb2.WatchRunRequest, context: Context) -> AsyncIterator[runs_pb2.RunEvent]:
        async for event in self._runs.watch(request.run_id, check_cursor(request.cursor)):
            yield to_proto(event, runs_pb2.RunEvent)

    async def ReadTimeline(
        self, request: runs_pb2.ReadTimelineRequest, context: Context
    ) -> AsyncIterator[runs_pb2.AttemptSpan]:
        cursor = check_cursor(request.cursor)
        async for span in self._runs.timeline(request.run_id, cursor, requests=request.requests):
            yield to_proto(span, runs_pb2.AttemptSpan)

    async def ClaimRun(self, request: runs_pb2.ClaimRunRequest, context: Context) -> runs_pb2.Lease:
        check_claim(request.role)
        waited_s = request.waited_s if request.HasField("waited_s") else math.inf
        lease, run = await self._runs.claim(request.run_id, request.role, request.holder, waited_s)
        return self._lease(to_proto(lease, runs_pb2.LeaseRef), run)

    async def RenewLease(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.Lease:
        run = await self._runs.renew(from_proto(request, LeaseRef))
        return self._lease(request, run)

    def _lease(self, ref: runs_pb2.LeaseRef, run: Run) -> runs_pb2.Lease:
        incarnation = self._runs.incarnation
        return runs_pb2.Lease(
            ref=ref,
            ttl_s=self._ttl_s,
            run=to_proto(run, runs_pb2.Run),
            store_life=incarnation.name,
            durable_after_s=self._runs.durability_lag_s(),
        )

    async def ReleaseLease(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.Empty:
        await self._runs.release(from_proto(request, LeaseRef))
        return runs_pb2.Empty()

    async def ReserveVersion(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.ReserveVersionResponse:
        version, seed = await self._runs.reserve_version(from_proto(request, LeaseRef))
        return runs_pb2.ReserveVersionResponse(version=version, publisher_seed=seed)

    async def AnnounceVersion(self, request: runs_pb2.AnnounceVersionRequest, context: Context) -> runs_pb2.Empty:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        await self._runs.announce(lease, from_proto(request.version, PolicyVersion, field="version"))
        return runs_pb2.Empty()

    async def ReadWorkLeft(self, request: runs_pb2.ReadWorkLeftRequest, context: Context) -> runs_pb2.WorkLeft:
        lease = check_lease(from_proto(request.lease, LeaseRef, field="lease"), role="trainer")
        found = await self._work.read(lease.run_id, groups=request.groups, fleet=request.fleet, wait_s=request.wait_s)
        return to_proto(found, runs_pb2.WorkLeft)

    async def ReleaseWorker(self, request: runs_pb2.ReleaseWorkerRequest, context: Context) -> runs_pb2.Empty:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        await self._runs.release_worker(lease, check_id(request.worker_id, field="worker_id"))
        return runs_pb2.Empty()

    async def Report(self, request: runs_pb2.ReportRequest, context: Context) -> runs_pb2.Empty:
        for index, event in enumerate(request.events):
            if event.ByteSize() > MAX_EVENT_BYTES:
                raise InvalidRequest(f"more than {MAX_EVENT_BYTES} bytes", field=f"events[{index}]")
        events = await records_from_proto(request.events, RunEvent, field="events")
        await self._runs.report(from_proto(request.lease, LeaseRef, field="lease"), events)
        return runs_pb2.Empty()

    async def WatchEnded(
        self, request: types_pb2.WatchEndedRequest, context: Context
    ) -> AsyncIterator[types_pb2.RunsEnded]:
        async for ended in self._runs.watch_ended(request.held):
            yield to_proto(ended, types_pb2.RunsEnded)

    async def FinishRun(self, request: runs_pb2.FinishRunRequest, context: Context) -> runs_pb2.Run:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        status = request.status or RunStatus.FINISHED
        return to_proto(await self._runs.finish(lease, status, shortened(request.message)), runs_pb2.Run)
