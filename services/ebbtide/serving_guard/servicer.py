"""Serves Grants and Loans on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest, NotReady
from ebbtide.types.grants import DeviceStatus, GuardStatus
from ebbtide.v1 import grants_pb2, loans_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsServicer
from ebbtide.v1.loans_pb2_grpc import LoansServicer
from ebbtide.wire import to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

GRANTS: Final = "ebbtide.v1.Grants"
LOANS: Final = "ebbtide.v1.Loans"
#: No watcher is answered more often.
_LEAST_S: Final = 0.05
_NO_TRAINER: Final = "this guard lends the device of a serving engine; for a trainer's, start it with owner = trainer"


class GrantServicer(GrantsServicer):
    """For the engines that borrow, and for people. `lend`: serves one borrower's stream. `status`: what a lender tells
    of itself now."""

    def __init__(
        self,
        lend: Callable[[AsyncIterator[grants_pb2.BorrowerMessage]], AsyncGenerator[grants_pb2.Grant, None]],
        status: Callable[[], GuardStatus],
    ) -> None:
        self._lend, self._status = lend, status

    async def Borrow(
        self, request_iterator: AsyncIterator[grants_pb2.BorrowerMessage], context: Context
    ) -> AsyncIterator[grants_pb2.Grant]:
        async with aclosing(self._lend(request_iterator)) as grants:
            async for grant in grants:
                yield grant

    async def WatchGuard(
        self, request: grants_pb2.WatchGuardRequest, context: Context
    ) -> AsyncIterator[grants_pb2.GuardStatus]:
        async for _ in _ticks(request.interval_s):
            yield to_proto(self._status(), grants_pb2.GuardStatus)


class LoanServicer(LoansServicer):
    """For the trainer that owns the device, and for people. `own`: serves one owner's stream. `status`: the
    device's."""

    def __init__(
        self,
        own: Callable[[AsyncIterator[loans_pb2.OwnerWish]], AsyncGenerator[loans_pb2.LoanState, None]],
        status: Callable[[], DeviceStatus],
    ) -> None:
        self._own, self._status = own, status

    async def Own(
        self, request_iterator: AsyncIterator[loans_pb2.OwnerWish], context: Context
    ) -> AsyncIterator[loans_pb2.LoanState]:
        async with aclosing(self._own(request_iterator)) as states:
            async for state in states:
                yield state

    async def WatchDevice(
        self, request: loans_pb2.WatchDeviceRequest, context: Context
    ) -> AsyncIterator[loans_pb2.DeviceStatus]:
        async for _ in _ticks(request.interval_s):
            yield to_proto(self._status(), loans_pb2.DeviceStatus)


class NoLoans:
    """Tells a trainer that the guard of its device was started as a serving engine's, so that its step waits."""

    async def Own(self, request_iterator: Any, context: Any) -> NoReturn:
        raise NotReady(_NO_TRAINER)

    async def WatchDevice(self, request: Any, context: Any) -> NoReturn:
        raise NotReady(_NO_TRAINER)


async def _ticks(interval_s: float) -> AsyncIterator[None]:
    """One tick each `interval_s`; without one, once. Raises `InvalidRequest` for what is no time."""
    if not 0 <= interval_s < math.inf:
        raise InvalidRequest("must be a number of seconds, or 0 for one answer", field="interval_s")
    while True:
        yield
        if not interval_s:
            break
        await asyncio.sleep(max(_LEAST_S, interval_s))
