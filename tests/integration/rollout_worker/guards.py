"""A serving-guard that does as a test says, on the very socket that a worker looks for."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ebbtide.auth.security import ServerSettings
from ebbtide.grants import Page, page_path, socket_path
from ebbtide.rpc.server import Server
from ebbtide.types.grants import GRANT_S, Budget
from ebbtide.v1 import grants_pb2, grants_pb2_grpc
from tests.support.waiting import wait_until

EVER = 1e9
#: Grants are renewed so often, as a real guard does.
RENEWED_S = 0.06


class Guard(grants_pb2_grpc.GrantsServicer):
    """Renews what `allow` says, and keeps what it hears."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._folder, self._worker_id = folder, worker_id
        self.hellos: list[grants_pb2.Hello] = []
        self.reports: list[grants_pb2.Report] = []
        self.streams = 0
        self.silent = False  # grants are no longer renewed
        self.fields: dict[str, Any] = {}
        self._tokens = 0
        self._ended = asyncio.Event()

    @property
    def page(self) -> Page:
        return Page(page_path(self._folder, self._worker_id))

    def allow(self, tokens: int, sequences: int = 64, until: float = EVER, idle: bool = True) -> None:
        self._tokens = tokens
        self.page.write_budget(Budget(tokens, sequences, until), idle=idle)

    def hang_up(self) -> None:
        """End all streams."""
        self._ended.set()

    async def Borrow(self, request_iterator: AsyncIterator[grants_pb2.BorrowerMessage], context: Any) -> Any:
        self.hellos.append((await anext(request_iterator)).hello)
        reading = asyncio.create_task(self._read(request_iterator))
        self.streams += 1
        self._ended.clear()
        try:
            while not self._ended.is_set():
                if not self.silent:
                    grant = {"tokens": 256, "sequences": 64, "expires_s": GRANT_S, "residency": 1, **self.fields}
                    yield grants_pb2.Grant(sequence=time.monotonic_ns(), **grant)
                await asyncio.sleep(RENEWED_S)
        finally:
            self.streams -= 1
            reading.cancel()

    async def _read(self, messages: AsyncIterator[grants_pb2.BorrowerMessage]) -> None:
        async for message in messages:
            self.reports.append(message.report)

    def WatchGuard(self, request: grants_pb2.WatchGuardRequest, context: Any) -> Any:
        raise NotImplementedError

    async def found(self) -> None:
        """Wait for the worker."""
        await wait_until(lambda: self.streams, what="a borrower")


@asynccontextmanager
async def guarding(folder: Path, worker_id: str) -> AsyncIterator[Guard]:
    """A guard in service until the end."""
    guard = Guard(folder, worker_id)
    settings = ServerSettings(listen=f"unix:{socket_path(folder)}")
    add = grants_pb2_grpc.add_GrantsServicer_to_server
    async with AsyncExitStack() as stack:
        server = Server(settings, [(add, guard, "ebbtide.v1.Grants")], private=True)
        await server.start()
        stack.push_async_callback(server.stop, grace=0.0)
        yield guard
