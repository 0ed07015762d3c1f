"""Serves Loans on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.loans.servicer import ticks
from ebbtide.serving_guard.trainer.device_report import DeviceReporter
from ebbtide.serving_guard.trainer.owner_stream import OwnerStream
from ebbtide.v1 import loans_pb2
from ebbtide.v1.loans_pb2_grpc import LoansServicer
from ebbtide.wire.record_conversion import to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

LOANS: Final = "ebbtide.v1.Loans"


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
        async for _ in ticks(request.interval_s):
            yield to_proto(self._report.now(), loans_pb2.DeviceStatus)
