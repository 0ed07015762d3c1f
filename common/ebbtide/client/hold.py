"""Holding a lease: renewals, and the end of everything under it once it is lost.

Invariant: `lost` is set once, when the coordinator says that the fence is old or the run over, and stays set; from then
on every guarded call raises `LeaseSuperseded`. When the process dies, renewals end, and another holder may claim the
run after the lease's time to live.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from ebbtide.client.retry import Peer, Request_contra, Response_co, Unary
from ebbtide.errors import EbbtideError, LeaseSuperseded, Unavailable
from ebbtide.rpc.convert import from_proto
from ebbtide.types.run import Run
from ebbtide.v1 import runs_pb2
from ebbtide.v1.runs_pb2_grpc import RunsStub

T = TypeVar("T")
log = logging.getLogger(__name__)


class Hold:
    """What every lease does. `run` is the run as the last renewal saw it."""

    def __init__(self, peer: Peer, claimed: runs_pb2.Lease) -> None:
        self._peer = peer
        self._fence = claimed.ref
        self._ttl_s = claimed.ttl_s
        self._renewals = asyncio.create_task(self._renew())
        self._renewals.add_done_callback(self._renewals_ended)
        self._reason = ""
        self.run = from_proto(claimed.run, Run)
        self.lost = asyncio.Event()

    @property
    def run_id(self) -> str:
        return self._fence.run_id

    @property
    def role(self) -> str:
        return self._fence.role

    async def release(self) -> None:
        """Give the lease back, so that another holder need not wait for its end. Tried once."""
        self._renewals.cancel()
        await asyncio.gather(self._renewals, return_exceptions=True)
        if self.lost.is_set():
            return
        try:
            with self._peer.translated():
                await RunsStub(self._peer.channel).ReleaseLease(self._fence, timeout=2.0)
        except EbbtideError as error:
            log.debug("lease of run %s not released (%s); it ends by itself", self.run_id, error)
        self._lose("it was released")

    async def _renew(self) -> None:
        stub = RunsStub(self._peer.channel)
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                with self._peer.translated():
                    renewed = await stub.RenewLease(self._fence, timeout=self._ttl_s)
                self._ttl_s, self.run = renewed.ttl_s, from_proto(renewed.run, Run)
            except Unavailable as error:  # the fence stands until somebody else claims the run
                log.warning("lease of run %s not renewed, trying on: %s", self.run_id, error)
            except EbbtideError as error:
                self._lose(str(error))
                return

    def _renewals_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"renewing it failed: {error!r}")

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self._reason = reason
            self.lost.set()

    def _check(self) -> None:
        if self.lost.is_set():
            raise LeaseSuperseded(f"the {self.role} lease of run {self.run_id} is gone ({self._reason}); claim it anew")

    async def _call(self, method: Unary[Request_contra, Response_co], request: Request_contra) -> Response_co:
        self._check()
        try:
            return await self._peer.call(method, request)
        except LeaseSuperseded as error:
            self._lose(str(error))
            raise

    def _result(self, done: asyncio.Future[T]) -> T:
        try:
            return done.result()
        except LeaseSuperseded as error:
            self._lose(str(error))
            raise

    async def _pause(self, seconds: float) -> None:
        """Wait; raises `LeaseSuperseded` as soon as the lease is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.lost.wait()
        self._check()

    async def _follow(self, resume: Callable[[], "grpc.aio.UnaryStreamCall[Any, T]"]) -> AsyncGenerator[T, None]:
        """A resumed stream that ends with `LeaseSuperseded` once the lease is lost, though it carries no fence."""
        self._check()
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            async with aclosing(self._peer.follow(resume)) as messages:
                while True:
                    following = asyncio.ensure_future(anext(messages, None))
                    try:
                        await asyncio.wait({following, lost}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not following.done():
                            following.cancel()
                            await asyncio.gather(following, return_exceptions=True)
                    message = None if following.cancelled() else self._result(following)
                    self._check()
                    if message is None:
                        return
                    yield message
        finally:
            lost.cancel()
