"""Holding a lease: renewals, and the end of everything under it once it is lost.

What was acknowledged under the lease is in its journal for as long as the store may forget it, and is sent again when
the store came back. Invariant: `lost` is set once, when the coordinator says that the fence is old or the run over, and
stays set; from then on every guarded call raises `LeaseSuperseded`. When the process dies, renewals end, and another
holder may claim the run after the lease's time to live.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from ebbtide.client.lease_journal import LeaseJournal
from ebbtide.client.service_peer import Request_contra, Response_co, ServicePeer, Unary
from ebbtide.errors import EbbtideError, LeaseSuperseded, NoCapacity, Unavailable
from ebbtide.rpc.channel import DEFAULT_TIMEOUT_S
from ebbtide.types.run import Run
from ebbtide.v1 import runs_pb2
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.wire.record_conversion import from_proto

T = TypeVar("T")
Message_contra = TypeVar("Message_contra", bound=Message, contravariant=True)
log = logging.getLogger(__name__)
#: Renewals are this often at least: they tell that the store came back, and what is durable.
_RENEW_S: Final = 5.0
#: Between renewals that something waits for.
_HURRY_S: Final = 0.25
#: What a leaving holder waits at most for its last calls to be durable, and for a version on its way.
LEAVE_S: Final = 10.0


class HeldLease:
    """What every lease does. `run` is the run as the last renewal saw it."""

    def __init__(self, peer: ServicePeer, claimed: runs_pb2.Lease) -> None:
        self._peer = peer
        self._fence = claimed.ref
        self._ttl_s = claimed.ttl_s
        self._journal = LeaseJournal()
        self._journal.renewed(claimed.store_life, claimed.durable_after_s, time.monotonic())
        self._hurry = asyncio.Event()  # renew at once
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
        """Give the lease back, so that another holder need not wait for its end. Tried once, when all that was done
        under the lease is durable; not waited for much longer than that should take.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._durable()
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HURRY_S if self._journal.owed() else min(self._ttl_s / 3, _RENEW_S)):
                    await self._hurry.wait()
            self._hurry.clear()
            asked = time.monotonic()
            try:
                with self._peer.translated():
                    renewed = await stub.RenewLease(self._fence, timeout=self._ttl_s)
                self._ttl_s, self.run = renewed.ttl_s, from_proto(renewed.run, Run)
                self._journal.renewed(renewed.store_life, renewed.durable_after_s, asked)
                await self._send_again()
            except Unavailable as error:  # the fence stands until somebody else claims the run
                log.warning("lease of run %s not renewed, trying on: %s", self.run_id, error)
            except EbbtideError as error:
                self._lose(str(error))
                return

    async def _send_again(self) -> None:
        """Send what the store may have forgotten, for a third of the lease's time: the rest is for after a renewal.
        Raises `Unavailable` with what was not sent still owed.
        """
        enough = time.monotonic() + self._ttl_s / 3
        while time.monotonic() < enough and (entry := self._journal.owed()) is not None:
            try:
                with self._peer.translated():
                    async with asyncio.timeout(self._ttl_s / 3):
                        await entry.call()
            except TimeoutError:
                raise Unavailable("sending again what the store forgot: a call took too long") from None
            except (Unavailable, LeaseSuperseded):
                raise
            except NoCapacity as error:
                raise Unavailable(f"sending again what the store forgot: {error}") from None
            except EbbtideError as error:  # it is there, or what it goes by is over
                log.warning("run %s: the store came back and refuses what it took before: %s", self.run_id, error)
            self._journal.sent(entry, time.monotonic())

    async def _durable(self) -> None:
        """Wait until the store cannot forget any more what was acknowledged, or the lease is lost."""
        while self._journal and not self.lost.is_set():
            self._hurry.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HURRY_S):
                    await self._journal.idle.wait()

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

    async def _kept(self, method: "Unary[Message_contra, Response_co]", request: "Message_contra") -> Response_co:
        """A call that is made again when the store forgot it. A full journal holds it back."""
        while not self._journal.room.is_set():
            self._hurry.set()
            await self._pause(_HURRY_S)
        answer = await self._call(method, request)
        self._journal.add(lambda: method(request, timeout=DEFAULT_TIMEOUT_S), request.ByteSize(), time.monotonic())
        return answer

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
