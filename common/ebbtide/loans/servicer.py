"""Serves Grants on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.types.grants import GuardStatus
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsServicer
from ebbtide.wire.record_conversion import to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

GRANTS: Final = "ebbtide.v1.Grants"
#: No watcher is answered more often.
_LEAST_S: Final = 0.05


class GrantServicer(GrantsServicer):
    """For the engines that borrow, and for people. `status`: what a lender tells of itself now."""

    def __init__(self, grants: GrantStream, status: Callable[[], GuardStatus]) -> None:
        self._grants, self._status = grants, status

    async def Borrow(
        self, request_iterator: AsyncIterator[pb.BorrowerMessage], context: Context
    ) -> AsyncIterator[pb.Grant]:
        async with aclosing(self._grants.serve(request_iterator)) as grants:
            async for grant in grants:
                yield grant

    async def WatchGuard(self, request: pb.WatchGuardRequest, context: Context) -> AsyncIterator[pb.GuardStatus]:
        async for _ in ticks(request.interval_s):
            yield to_proto(self._status(), pb.GuardStatus)


async def ticks(interval_s: float) -> AsyncIterator[None]:
    """One tick each `interval_s`; without one, once. Raises `InvalidRequest` for what is no time."""
    if not 0 <= interval_s < math.inf:
        raise InvalidRequest("must be a number of seconds, or 0 for one answer", field="interval_s")
    while True:
        yield
        if not interval_s:
            break
        await asyncio.sleep(max(_LEAST_S, interval_s))
