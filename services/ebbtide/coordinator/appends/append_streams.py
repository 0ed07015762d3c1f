"""Serves workers' append streams: checks each message, stores it and acknowledges it.

A message is checked whole before any of it is stored; the tokens' bytes are not inspected. While the store is away a
message waits, and with it only its own stream. A stream ends when the store came back, so that the worker sends again
what was not durable.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from ebbtide.coordinator import metrics
from ebbtide.coordinator.appends.append_batcher import AppendBatcher, StreamAttempts
from ebbtide.coordinator.appends.token_readers import TokenReaders
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState, StoreIncarnation
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import StoreUnavailable
from ebbtide.store.link.store_connection import StoreConnection
from ebbtide.store.store import Store
from ebbtide.types.append_delta import AppendAck
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.append_columns import AppendReceiver

Responses = AsyncIterator[fleet_pb2.AppendResponse]
#: Pause while the store is away.
_AWAY_S: Final = 0.2


class AppendStreams:
    def __init__(
        self,
        state: CoordinatorState,
        store: Store,
        fleet: WorkerRegistry,
        notifier: Notifier,
        readers: TokenReaders,
    ) -> None:
        self._state, self._fleet, self._link = state, fleet, store.link
        self._storing = AppendBatcher(state, store, notifier, readers)

    def stream(self, requests: AsyncIterator[fleet_pb2.AppendRequest]) -> Responses:
        """Answer a worker's messages in their order."""
        answers = self._answers(requests)
        incarnation = self._state.incarnation
        return _twice(answers, incarnation, self._link) if incarnation.durable_after_s else answers

    async def _answers(self, requests: AsyncIterator[fleet_pb2.AppendRequest]) -> Responses:
        receiver, attempts, name = AppendReceiver(), StreamAttempts(), ""
        with ExitStack() as stack, Cut() as cut:
            messages = aiter(requests)
            while (request := await cut.next(messages)) is not None:
                session = self._fleet.session(request.session or name)
                if session.session_id != name:
                    name = session.session_id
                    stack.enter_context(session.appending())
                    cut.by(session)
                session.message_came()
                try:
                    answer = await self._append(session, receiver, attempts, request)
                finally:
                    session.message_answered()
                yield answer

    async def _append(
        self,
        session: WorkerSession,
        receiver: AppendReceiver,
        attempts: StreamAttempts,
        request: fleet_pb2.AppendRequest,
    ) -> fleet_pb2.AppendResponse:
        """Store one message. Raises `InvalidRequest`."""
        start = time.monotonic()
        works = receiver.columns(request)
        attempts.opened(request)
        others: dict[int, AppendAck] = {}
        incarnation = self._state.incarnation
        if works:
            if request.tokens:
                session.tokens_came(self._state.clock())
            runs = self._state.runs
            found = [attempts.of(runs.get(columns.run_id), columns, places) for places, columns in works]
            pairs = zip(works, found, strict=True)
            stores = [self._storing.keep(session, columns, one) for (_, columns), one in pairs]
            acks = [await stores[0]] if len(stores) == 1 else await asyncio.gather(*stores)
            for (places, _), some in zip(works, acks, strict=True):
                others.update({places[i]: ack for i, ack in some.items()})
        metrics.append_seconds.observe(time.monotonic() - start)
        answers = [_answer(place, ack) for place, ack in others.items()] if others else None
        return fleet_pb2.AppendResponse(sequence=request.sequence, others=answers, durable=incarnation.durable())


class Cut:
    """Ends a worker's append stream from outside, so that the worker opens another and sends again. Entered for the
    length of one stream.

    Invariant: a stream is cut only between two messages: those taken in are stored and answered first.
    """

    def __init__(self) -> None:
        self._session: WorkerSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[object] | None = None
        self._made = False

    def by(self, session: WorkerSession) -> None:
        """End the stream once this session, which it turned out to serve, is to `resend`."""
        session.stream_opened()
        self._stop()
        self._session, self._watch = session, asyncio.create_task(self._wait(session))

    async def _wait(self, session: WorkerSession) -> None:
        await session.resend.wait()
        if self._reading is not None:
            self._made = True
            self._reading.cancel()

    async def next(self, messages: AsyncIterator[fleet_pb2.AppendRequest]) -> fleet_pb2.AppendRequest | None:
        """The next message; None at the end. Raises `StoreUnavailable` once the worker is to send again."""
        if self._session is not None and self._session.resend.is_set():
            raise _again()
        self._reading = reading = asyncio.current_task()
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            if not self._made or reading is None or reading.uncancel():
                raise
            raise _again() from None
        finally:
            self._reading = None
            del reading  # its error refers to this frame

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._session = None  # its error refers to a frame that has this object


def _again() -> StoreUnavailable:
    return StoreUnavailable("the store came back: open the stream again, and send again what is not durable")


async def _twice(answers: Responses, incarnation: StoreIncarnation, link: StoreConnection) -> Responses:
    """Each answer at once, and again, by its number only, when it has become durable."""
    out: asyncio.Queue[fleet_pb2.AppendResponse | None] = asyncio.Queue()
    unsure: deque[tuple[float, int]] = deque()  # when a message was stored, and its number
    came = asyncio.Event()

    async def read() -> None:
        try:
            async for answer in answers:
                out.put_nowait(answer)
                unsure.append((time.monotonic(), answer.sequence))
                came.set()
        finally:
            out.put_nowait(None)

    async def confirm() -> None:
        """Confirm what a later look at the store shows to be durable."""
        while not incarnation.over.is_set():  # else the stream ends, and the worker sends again
            came.clear()
            if not unsure:
                await came.wait()
            try:
                before = await link.durability.until(unsure[0][0], incarnation=incarnation.name)
            except StoreUnavailable:
                await asyncio.sleep(_AWAY_S)
                continue
            while unsure and unsure[0][0] <= before:
                out.put_nowait(fleet_pb2.AppendResponse(sequence=unsure.popleft()[1], durable=True))

    reader, confirmer = asyncio.create_task(read()), asyncio.create_task(confirm())
    try:
        while (answer := await out.get()) is not None:
            yield answer
        reader.result()
    finally:
        reader.cancel()
        confirmer.cancel()


def _answer(index: int, ack: AppendAck) -> fleet_pb2.AppendAck:
    status = fleet_pb2.AppendAck.Status.ValueType(ack.status)
    return fleet_pb2.AppendAck(index=index, status=status, stored=ack.stored, finished=ack.finished)
