"""Serves the Grants service on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.serving_guard.guard_status import StatusReporter
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsServicer
from ebbtide.wire.record_conversion import to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "ebbtide.v1.Grants"


class GrantServicer(GrantsServicer):
    def __init__(self, grants: GrantStream, status: StatusReporter) -> None:
        self._grants, self._status = grants, status

    async def Borrow(
        self, request_iterator: AsyncIterator[pb.BorrowerMessage], context: Context
    ) -> AsyncIterator[pb.Grant]:
        async with aclosing(self._grants.serve(request_iterator)) as grants:
            async for grant in grants:
                yield grant

    async def WatchGuard(self, request: pb.WatchGuardRequest, context: Context) -> AsyncIterator[pb.GuardStatus]:
        if not 0 <= request.interval_s < math.inf:
            raise InvalidRequest("must be a number of seconds, or 0 for one answer", field="interval_s")
        while True:
            yield to_proto(self._status.now(), pb.GuardStatus)
            if not request.interval_s:
                break
            await asyncio.sleep(max(0.05, request.interval_s))
