"""Serves the Grants service on a socket in a private folder, whose mode is the access check: no token is used."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest, Superseded
from ebbtide.serving_guard.grant_issuer import GrantIssuer
from ebbtide.serving_guard.guard_status import StatusReporter
from ebbtide.serving_guard.loans.borrower_table import BorrowerTable
from ebbtide.serving_guard.loans.loan import Loan
from ebbtide.types.grants import BorrowerReport, Hello
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsServicer
from ebbtide.wire.record_conversion import from_proto, to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "ebbtide.v1.Grants"
#: A worker that opens a stream sends Hello within this time.
_HELLO_S: Final = 5.0
#: Its first report follows at once. Until then it is unknown whether its weights are awake.
_REPORT_S: Final = 0.25
#: A grant holds for 200 ms, so two of three may come late.
_RENEW_S: Final = 0.06


class GrantServicer(GrantsServicer):
    def __init__(self, borrowers: BorrowerTable, issuer: GrantIssuer, status: StatusReporter) -> None:
        self._borrowers, self._issuer, self._status = borrowers, issuer, status

    async def Borrow(
        self, request_iterator: AsyncIterator[pb.BorrowerMessage], context: Context
    ) -> AsyncIterator[pb.Grant]:
        loan = self._borrowers.join(await _hello(request_iterator))
        reader = asyncio.create_task(self._read(request_iterator, loan))
        reason = "its stream broke"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await loan.reported.wait()
            for sequence in count(1):
                yield to_proto(self._issuer.issue(loan, sequence), pb.Grant)
                if loan.gone_at is not None:
                    raise Superseded("this grant is over: the worker connected again, or had to be killed")
                await self._pause(reader)
                if reader.done():
                    reason = "it closed its stream"
                    reader.result()
                    break
        except InvalidRequest as error:
            reason = f"it sent an invalid message: {error}"
            raise
        finally:
            reader.cancel()
            self._borrowers.leave(loan, reason)

    async def WatchGuard(self, request: pb.WatchGuardRequest, context: Context) -> AsyncIterator[pb.GuardStatus]:
        if not 0 <= request.interval_s < math.inf:
            raise InvalidRequest("must be a number of seconds, or 0 for one answer", field="interval_s")
        while True:
            yield to_proto(self._status.now(), pb.GuardStatus)
            if not request.interval_s:
                break
            await asyncio.sleep(max(0.05, request.interval_s))

    async def _read(self, requests: AsyncIterator[pb.BorrowerMessage], loan: Loan) -> None:
        async for message in requests:
            if message.WhichOneof("kind") != "report":
                raise InvalidRequest("only the first message may be hello; send reports after it", field="kind")
            self._borrowers.record_report(loan, from_proto(message.report, BorrowerReport, field="report"))

    async def _pause(self, reader: asyncio.Task[None]) -> None:
        """Wait until the next grant is due, a grant changes or the worker ends its stream."""
        news = asyncio.ensure_future(self._borrowers.news.wait())
        try:
            await asyncio.wait((news, reader), timeout=_RENEW_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._borrowers.news.clear()


async def _hello(requests: AsyncIterator[pb.BorrowerMessage]) -> Hello:
    first = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_HELLO_S):
            first = await anext(requests, None)
    if first is None or first.WhichOneof("kind") != "hello":
        raise InvalidRequest("the first message must be hello", field="kind")
    return from_proto(first.hello, Hello, field="hello")
