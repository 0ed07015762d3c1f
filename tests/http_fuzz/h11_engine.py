"""Imitates an engine that reads requests by h11 and answers them as planned."""

import asyncio
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from tests.http_fuzz.answer_plans import AnswerPlan
from tests.http_fuzz.http_reader import HttpMessage, RequestReader
from tests.support.waiting import wait_until


class Served(Struct):
    """A request that reached the engine, and the answer it got."""

    message: HttpMessage
    plan: AnswerPlan
    fresh: bool  # whether it was the first on its connection
    sent: bool = False  # whether the answer is written


class H11Engine:
    """An engine on a port of its own. `plan` is called once for each request, when its head is here."""

    def __init__(self) -> None:
        self.plan: Callable[[HttpMessage], AnswerPlan]
        self.served: list[Served] = []
        self.errors: list[str] = []
        self.open: set[_EngineSide] = set()
        self._server: asyncio.Server

    async def start(self) -> str:
        """Returns the URL."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _EngineSide(self), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for side in list(self.open):
            side.transport.abort()
        await wait_until(lambda: not self.open)

    def begin(self) -> None:
        """Forget the requests of the case before."""
        self.served, self.errors = [], []


class _EngineSide(asyncio.Protocol):
    def __init__(self, engine: H11Engine) -> None:
        self._engine = engine
        self.transport: asyncio.Transport
        self._reader = RequestReader()
        self._waiting: list[Served] = []
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class does not derive from it
        self._engine.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.open.discard(self)
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        engine = self._engine
        for message in self._reader.feed(data):
            if not self._waiting or self._waiting[-1].message is not message:
                self._waiting.append(Served(message, engine.plan(message), fresh=message is self._reader.messages[0]))
                engine.served.append(self._waiting[-1])
        if self._reader.error:
            engine.errors.append(self._reader.error)
            self.transport.abort()
            return
        if self._answering is None and self._due() is not None:
            self._answering = asyncio.get_running_loop().create_task(self._answer())

    def _due(self) -> Served | None:
        """The request that is to be answered now."""
        while self._waiting and self._waiting[0].sent and self._waiting[0].message.complete:
            self._waiting.pop(0)
        first = next(iter(self._waiting), None)
        return first if first and not first.sent and (first.message.complete or first.plan.early) else None

    async def _answer(self) -> None:
        while (one := self._due()) is not None:
            for piece in one.plan.pieces:
                self.transport.write(piece)
                await asyncio.sleep(0)
            one.sent = True
            if one.plan.closes:
                self.transport.close()
                return
        self._answering = None
