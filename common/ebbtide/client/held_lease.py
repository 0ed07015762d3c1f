"""Renews a lease, guards the calls made under it, and repeats calls that the store forgot.

The journal keeps each acknowledged call until it is durable, and sends it again after the store has lost it. It also
numbers the lease's submits. Calls wait while it is full.

Invariant: `lost` is set once, when the coordinator reports an old fence or an ended run, and stays set; every later
guarded call raises `LeaseSuperseded`. When the process dies, renewals stop, and another holder can claim the run after
the lease's time to live.

Invariant of the journal: entries stand in the order of their acknowledgement, which is also a valid order to repeat
them, and no entry before `_from` is owed; an entry leaves only when it is known to be durable. `_unsettled` has, in
ascending order, the numbers of the submits that are under way or stand in the journal: only these may come to the
coordinator and be taken. When the process dies the journal is lost, and with it the calls that the store forgets at the
same time.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.client.service_peer import Request_contra, Response_co, ServicePeer, Unary
from ebbtide.errors import EbbtideError, LeaseSuperseded, NoCapacity, RateLimited, Unavailable
from ebbtide.rpc.channel import DEFAULT_TIMEOUT_S
from ebbtide.types.rollout import MAX_UNSETTLED, SubmitOrder
from ebbtide.types.run import Run
from ebbtide.v1 import runs_pb2
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.wire import from_proto

#: About what a driver sends in some seconds at the coordinator's highest rate.
_LIMIT_BYTES: Final = 64 << 20
#: Bytes that an entry takes besides its request.
_OVERHEAD: Final = 512


class JournalEntry(Struct, eq=False):
    """A call that can be repeated."""

    call: Callable[[], Awaitable[Any]]
    size: int  # bytes
    at: float  # last acknowledged, monotonic seconds
    owed: bool = False  # the store forgot it: repeat it
    number: int = 0  # of a submit


class LeaseJournal:
    """Pure except for its events: the caller passes the time."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._entries: list[JournalEntry] = []
        self._size = 0
        self._from = 0  # where the search for owed entries starts
        self._incarnation = ""  # of the store
        self._durable_after_s = 0.0
        self._numbers = 0  # given
        self._unsettled: dict[int, int | None] = {}  # to the submit's step
        self._steps: Counter[int] = Counter()  # submits of each step among them
        #: Set while the journal takes more, and while it is empty.
        self.room, self.idle = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def needed(self) -> bool:
        """Tell whether the store can forget acknowledged calls."""
        return self._durable_after_s > 0

    def order(self, *, step: int | None, first_step: int) -> SubmitOrder:
        """Number a submit that begins. No step counts as over while the store may forget a submit of it. The number is
        0 while too many submits are not settled; then the coordinator recognises a repeat by the rollouts' ids alone.
        """
        first_step = min([first_step, *self._steps])
        settled = next(iter(self._unsettled), self._numbers + 1)
        if self._numbers + 1 - settled >= MAX_UNSETTLED:
            return SubmitOrder(step=step, first_step=first_step)
        self._numbers += 1
        self._unsettled[self._numbers] = step
        if step is not None:
            self._steps[step] += 1
        return SubmitOrder(sequence=self._numbers, settled=settled, step=step, first_step=first_step)

    def settle(self, number: int) -> None:
        """Note that a numbered submit was refused, or is not repeated any more."""
        step = self._unsettled.pop(number, None)
        if step is not None:
            self._steps[step] -= 1
            if not self._steps[step]:
                del self._steps[step]

    def add(self, call: Callable[[], Awaitable[Any]], size: int, now: float, number: int = 0) -> None:
        """Record a call that was just acknowledged. `number`: of a submit."""
        if self.needed:
            self._entries.append(JournalEntry(call, size + _OVERHEAD, now, number=number))
            self._size += size + _OVERHEAD
            self._update_events()
        else:
            self.settle(number)

    def renewed(self, incarnation: str, durable_after_s: float, asked: float) -> None:
        """Note a renewal that was requested at `asked` and answered by this incarnation of the store. All entries are
        owed if it is a new one; otherwise those that are durable by now leave, by the longer of the last two times.
        """
        if incarnation != self._incarnation and self._incarnation:
            for entry in self._entries:
                entry.owed = True
        else:
            durable = asked - max(self._durable_after_s, durable_after_s)
            for entry in self._entries:
                if not entry.owed and entry.at <= durable:
                    self.settle(entry.number)
            self._entries = [entry for entry in self._entries if entry.owed or entry.at > durable]
            self._size = sum(entry.size for entry in self._entries)
        self._from = 0
        self._incarnation, self._durable_after_s = incarnation, durable_after_s
        self._update_events()

    def owed(self) -> JournalEntry | None:
        """Return the first entry to repeat."""
        while self._from < len(self._entries):
            if (entry := self._entries[self._from]).owed:
                return entry
            self._from += 1
        return None

    def sent(self, entry: JournalEntry, now: float) -> None:
        """Note that an entry was acknowledged again, or finally refused."""
        entry.owed, entry.at = False, now

    def _update_events(self) -> None:
        for event, on in ((self.room, self._size < self._limit), (self.idle, not self._entries)):
            (event.set if on else event.clear)()


T = TypeVar("T")
Message_contra = TypeVar("Message_contra", bound=Message, contravariant=True)
log = logging.getLogger(__name__)
#: Longest time between renewals, which report the store's incarnation and what is durable.
_RENEW_S: Final = 5.0
#: Between renewals while something waits for their answer.
_HURRY_S: Final = 0.25
#: A released lease waits at most so long for its last calls to be durable, and for an unfinished version.
LEAVE_S: Final = 10.0


class HeldLease:
    """Does what leases of all roles need."""

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
        self.run = from_proto(claimed.run, Run)  # as of the last renewal
        self.lost = asyncio.Event()

    @property
    def run_id(self) -> str:
        return self._fence.run_id

    @property
    def number(self) -> int:
        """Counts the claims of the role, so a newer lease of the run has a higher one; 0: they are not counted."""
        return self._fence.number

    @property
    def role(self) -> str:
        return self._fence.role

    async def release(self) -> None:
        """Give the lease back, so that another holder can claim it at once. Waits up to `LEAVE_S` for the calls made
        under it to be durable, and tries once.
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
            log.debug("lease of run %s not released (%s); it expires by itself", self.run_id, error)
        self._lose("it was released")

    async def _renew(self) -> None:
        stub = RunsStub(self._peer.channel)
        while True:
            await _wait(self._hurry, _HURRY_S if self._journal.owed() else min(self._ttl_s / 3, _RENEW_S))
            self._hurry.clear()
            asked = time.monotonic()
            try:
                with self._peer.translated():
                    renewed = await stub.RenewLease(self._fence, timeout=self._ttl_s)
                self._ttl_s, self.run = renewed.ttl_s, from_proto(renewed.run, Run)
                self._journal.renewed(renewed.store_life, renewed.durable_after_s, asked)
                await self._send_again()
            except Unavailable as error:  # the fence is valid until another holder claims the run
                log.warning("lease of run %s not renewed, trying again: %s", self.run_id, error)
            except EbbtideError as error:
                self._lose(str(error))
                return

    async def _send_again(self) -> None:
        """Repeat the calls that the store forgot, for a third of the lease's time; the next renewal continues.
        Raises `Unavailable`; calls not yet repeated stay owed.
        """
        enough = time.monotonic() + self._ttl_s / 3
        while time.monotonic() < enough and (entry := self._journal.owed()) is not None:
            try:
                with self._peer.translated():
                    async with asyncio.timeout(self._ttl_s / 3):
                        await entry.call()
            except TimeoutError:
                raise Unavailable("repeating calls that the store forgot: a call took too long") from None
            except (Unavailable, LeaseSuperseded):
                raise
            except EbbtideError as error:
                if isinstance(error, NoCapacity) and not isinstance(error, RateLimited):
                    raise Unavailable(f"repeating calls that the store forgot: {error}") from None
                # The store has it, or its subject has ended, or its client's key has reached a limit meanwhile.
                log.warning("run %s: the restored store refuses a call that it took before: %s", self.run_id, error)
            self._journal.sent(entry, time.monotonic())

    async def _durable(self) -> None:
        """Wait until all acknowledged calls are durable, or the lease is lost."""
        while self._journal and not self.lost.is_set():
            self._hurry.set()
            await _wait(self._journal.idle, _HURRY_S)

    def _renewals_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"renewing it failed: {error!r}")

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self._reason = reason
            self.lost.set()

    def _check(self) -> None:
        if self.lost.is_set():
            text = f"the {self.role} lease of run {self.run_id} is lost ({self._reason}); claim the run again"
            raise LeaseSuperseded(text)

    async def _call(
        self,
        method: Unary[Request_contra, Response_co],
        request: Request_contra,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Response_co:
        self._check()
        try:
            return await self._peer.call(method, request, timeout_s=timeout_s)
        except LeaseSuperseded as error:
            self._lose(str(error))
            raise

    async def _kept(
        self, method: "Unary[Message_contra, Response_co]", request: "Message_contra", number: int = 0
    ) -> Response_co:
        """Make a call that is repeated if the store forgets it. Waits while the journal is full.

        `number`: that the journal gave a submit.
        """
        while not self._journal.room.is_set():
            self._hurry.set()
            await self._pause(_HURRY_S)
        answer = await self._call(method, request)
        again, size = (lambda: method(request, timeout=DEFAULT_TIMEOUT_S)), request.ByteSize()
        self._journal.add(again, size, time.monotonic(), number)
        return answer

    def _result(self, done: asyncio.Future[T]) -> T:
        try:
            return done.result()
        except LeaseSuperseded as error:
            self._lose(str(error))
            raise

    async def _pause(self, seconds: float) -> None:
        """Sleep; raises `LeaseSuperseded` as soon as the lease is lost."""
        await _wait(self.lost, seconds)
        self._check()

    async def _follow(self, resume: Callable[[], "grpc.aio.UnaryStreamCall[Any, T]"]) -> AsyncGenerator[T, None]:
        """Follow a resumed stream; raises `LeaseSuperseded` once the lease is lost, though the stream has no fence."""
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
                        elif not following.cancelled():
                            following.exception()  # a reader that is cancelled now does not ask for it
                    message = None if following.cancelled() else self._result(following)
                    self._check()
                    if message is None:
                        return
                    yield message
        finally:
            lost.cancel()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
