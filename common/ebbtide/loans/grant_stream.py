"""Serves a worker that borrows: its Hello, the grants that it gets, and its reports, on one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from itertools import count
from typing import Final

from ebbtide.errors import InvalidRequest, Superseded
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.loans.loan import Loan
from ebbtide.types.grants import BorrowerReport, Hello
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.wire.record_conversion import from_proto, to_proto

#: A worker that opens a stream sends Hello within this time.
_HELLO_S: Final = 5.0
#: Its first report follows at once. Until then it is unknown whether its weights are awake.
_REPORT_S: Final = 0.25
#: A grant holds for 200 ms, so two of three may come late.
_RENEW_S: Final = 0.06


class GrantStream:
    """Serves the streams of all borrowers; a servicer's `Borrow` is its `serve`."""

    def __init__(self, borrowers: BorrowerTable, issuer: GrantIssuer) -> None:
        self._borrowers, self._issuer = borrowers, issuer

    async def serve(self, requests: AsyncIterator[pb.BorrowerMessage]) -> AsyncGenerator[pb.Grant, None]:
        """Lend to one worker until its stream ends. Raises `InvalidRequest`, `NotReady` or `Superseded`."""
        loan = self._borrowers.join(await _hello(requests))
        reader = asyncio.create_task(self._read(requests, loan))
        reason = "its stream broke"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await loan.reported.wait()
            for sequence in count(1):
                loan.issued = sequence
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
