"""Serves Loans and Grants on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.device_arbiter.device_report import DeviceReporter
from ebbtide.device_arbiter.owner_stream import OwnerStream
from ebbtide.errors import InvalidRequest
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.v1 import grants_pb2, loans_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsServicer
from ebbtide.v1.loans_pb2_grpc import LoansServicer
from ebbtide.wire.record_conversion import to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

GRANTS: Final = "ebbtide.v1.Grants"
LOANS: Final = "ebbtide.v1.Loans"
#: No watcher is answered more often.
_LEAST_S: Final = 0.05


class TenantServicer(GrantsServicer):
    """For the engines that borrow: to them this is a guard."""

    def __init__(self, grants: GrantStream, report: DeviceReporter) -> None:
        self._grants, self._report = grants, report

    async def Borrow(
        self, request_iterator: AsyncIterator[grants_pb2.BorrowerMessage], context: Context
    ) -> AsyncIterator[grants_pb2.Grant]:
        async with aclosing(self._grants.serve(request_iterator)) as grants:
            async for grant in grants:
                yield grant

    async def WatchGuard(
        self, request: grants_pb2.WatchGuardRequest, context: Context
    ) -> AsyncIterator[grants_pb2.GuardStatus]:
        async for _ in _ticks(request.interval_s):
            yield to_proto(self._report.as_guard(), grants_pb2.GuardStatus)


class LoanServicer(LoansServicer):
    """For the trainer that owns the device, and for people."""

    def __init__(self, owners: OwnerStream, report: DeviceReporter) -> None:
        self._owners, self._report = owners, report

    async def Own(
        self, request_iterator: AsyncIterator[loans_pb2.OwnerWish], context: Context
    ) -> AsyncIterator[loans_pb2.LoanState]:
        async with aclosing(self._owners.serve(request_iterator)) as states:
            async for state in states:
                yield state

    async def WatchDevice(
        self, request: loans_pb2.WatchDeviceRequest, context: Context
    ) -> AsyncIterator[loans_pb2.DeviceStatus]:
        async for _ in _ticks(request.interval_s):
            yield to_proto(self._report.now(), loans_pb2.DeviceStatus)


async def _ticks(interval_s: float) -> AsyncIterator[None]:
    """One tick each `interval_s`; without one, once."""
    if not 0 <= interval_s < math.inf:
        raise InvalidRequest("must be a number of seconds, or 0 for one answer", field="interval_s")
    while True:
        yield
        if not interval_s:
            break
        await asyncio.sleep(max(_LEAST_S, interval_s))
