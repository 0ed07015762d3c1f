"""Serves workers' append streams: checks each message, stores and acknowledges it, and confirms it once it is durable.

A message is checked whole before any of it is stored; the tokens' bytes are not inspected. While the store is away a
message waits, and with it only its own stream. A stream ends when the store came back, so that the worker sends again
what was not durable.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, NamedTuple, Self

from ebbtide.append_stream import MAX_DELTAS, AppendAck, AppendColumns, AppendReceiver, joined
from ebbtide.coordinator import metrics
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.state.coordinator_state import CoordinatorState, StoreIncarnation
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.coordinator.token_readers import TokenReaders
from ebbtide.errors import InvalidRequest, NotFound, StoreUnavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.store.connection import StoreConnection
from ebbtide.store.records import UNEXPECTED
from ebbtide.store.store import Store
from ebbtide.types.fleet import AppendStatus, EndCause, EndReason
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2

#: Numbers opened between two looks for attempts that are over without a finish: so many more are in memory.
_OPENED: Final = 64


class FoundAttempts(NamedTuple):
    attempts: Sequence[RunningAttempt | None]  # of each delta; None: the mirror does not have it
    follow_on: bool  # all deltas begin where the mirror says that the stored tokens end


class StreamAttempts:
    """Finds the mirror's attempts of one append stream by the numbers that its worker gave them.

    Invariant: an attempt that was found is kept for its number while it has a worker, for then the run has it as
    running. Otherwise, and while the run has unconfirmed attempts, the run is asked by ids. Each flush has most of a
    worker's attempts again, and looking them up by ids costs more than all else that is done with them.
    """

    def __init__(self) -> None:
        self._known: list[RunningAttempt | None] = [None] * MAX_DELTAS
        self._opened = 0  # numbers, since the last look for attempts that are over

    def opened(self, request: fleet_pb2.AppendRequest) -> None:
        """Note that numbers stand for other attempts from now on."""
        for one in request.opened:
            self._known[one.number] = None
        self._opened += len(request.opened)
        if self._opened >= _OPENED:
            self._opened = 0
            self._known = [one if one is not None and one.session is not None else None for one in self._known]

    def of(self, run: RunState | None, deltas: AppendColumns, places: Sequence[int]) -> FoundAttempts:
        """The attempts of a run's deltas, which are noted to have begun. `places`: of the deltas in their message.
        Raises `InvalidRequest` for more tokens than a rollout may have.
        """
        if run is None:
            return FoundAttempts([None] * len(deltas.numbers), follow_on=False)
        known, sure, follow_on = self._known, not run.unconfirmed, True
        found = [known[number] for number in deltas.numbers]
        for i, (attempt, end, count) in enumerate(zip(found, deltas.ends, deltas.counts, strict=True)):
            if attempt is None or attempt.session is None or not sure:
                attempt = found[i] = known[deltas.numbers[i]] = _running(run, deltas, i)  # noqa: PLW2901 - it is the delta's
                if attempt is None:
                    follow_on = False
                    continue
            if end > attempt.most:
                text = f"more than the rollout's max_tokens ({attempt.max_tokens})"
                raise InvalidRequest(text, field=f"deltas[{places[i]}].tokens")
            if attempt.stored != end - count:
                follow_on = False
            if count and not attempt.started:
                attempt.begin(run.clock())
        self._finished(deltas)
        return FoundAttempts(found, follow_on)

    def _finished(self, deltas: AppendColumns) -> None:
        """Let go of the attempts that their deltas finish."""
        for place in deltas.finishes:
            self._known[deltas.numbers[place]] = None


def _running(run: RunState, deltas: AppendColumns, i: int) -> RunningAttempt | None:
    attempt = run.running.get(deltas.rollouts[i])
    return attempt if attempt is not None and attempt.attempt_id == deltas.attempts[i] else None


#: Least time between two calls of a run: each costs the store a turn and an fsync, whatever its size. The second while
#: the event loop is late.
_GATHER_S: Final = 0.005
_GATHER_LATE_S: Final = 0.05
#: Bytes per call, unless a single message has more.
_CALL_BYTES: Final = 4 << 20
_OUTCOMES: Final = {status: metrics.appends.labels(status.name.lower()) for status in AppendStatus}


class _Message:
    def __init__(self, deltas: AppendColumns, found: FoundAttempts) -> None:
        self.deltas = deltas
        self.attempts, self.follow_on = found
        #: The deltas that were not stored as they were sent, by place.
        self.answer: asyncio.Future[dict[int, AppendAck]] = asyncio.get_running_loop().create_future()
        self.left = False  # its stream is over: the answer is not needed


class AppendBatcher:
    """Stores appends: messages of one run that arrive close together go to the store in one call.

    Invariant: a run has one call at a time, with the messages since the last one in order of arrival, so each stream's
    messages stay in order. While the store is away, or the run is not reconciled, its messages wait; but if the run's
    data is broken, its attempts are over, because other runs' tokens wait behind them in the same streams. Messages
    that are unanswered when this process dies may or may not be stored: workers send them again.
    """

    def __init__(self, state: CoordinatorState, store: Store, notifier: Notifier, readers: TokenReaders) -> None:
        self._state, self._store, self._notifier, self._readers = state, store, notifier, readers
        self._queues: dict[str, list[_Message]] = {}  # by run; a run is here while it has a task
        self._tasks: set[asyncio.Task[None]] = set()

    async def keep(self, session: WorkerSession, deltas: AppendColumns, found: FoundAttempts) -> dict[int, AppendAck]:
        """Store deltas of one run. Returns, by place, those that were not stored as they were sent."""
        message = _Message(deltas, found)
        run_id = deltas.run_id
        if (queue := self._queues.get(run_id)) is not None:
            queue.append(message)
        else:
            self._queues[run_id] = [message]
            task = asyncio.create_task(self._empty(run_id), name=f"append {run_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(message.answer)
        except asyncio.CancelledError:
            message.left = True
            if not message.answer.done():  # until then the worker's attempts are not re-queued
                hold = ExitStack()
                hold.enter_context(session.append_stream.streaming())
                message.answer.add_done_callback(lambda _: hold.close())
            raise
        finally:
            del message  # its answer may be an error, which refers to this frame

    async def _empty(self, run_id: str) -> None:
        queue = self._queues[run_id]
        waits = pauses(0.05, 1.0)
        try:
            while queue:
                late = self._state.sheds(Work.ACKNOWLEDGEMENTS)
                again = time.monotonic() + (_GATHER_LATE_S if late else _GATHER_S)
                run = self._state.runs.get(run_id)
                if run is not None:
                    await run.mirror.answerable.wait()
                if await self._call(run, messages := _next_batch(queue)):
                    waits = pauses(0.05, 1.0)
                else:
                    queue[:0] = messages
                    await asyncio.sleep(next(waits))
                    _drop_left(queue)
                if (pause := again - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
        finally:
            del self._queues[run_id]
            for message in queue:
                message.answer.cancel()

    async def _call(self, run: RunState | None, messages: list[_Message]) -> bool:
        """Store messages in one call, and answer each; False if the store is away."""
        try:
            others = await self._stored(run, messages)
        except StoreUnavailable:
            return False
        except asyncio.CancelledError:
            for one in messages:
                one.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each stream ends with it
            for one in messages:
                one.answer.set_exception(error)
                one.answer.exception() if one.left else None
            return True
        _count(messages, others)
        first = 0
        for one in messages:
            end = first + len(one.attempts)
            one.answer.set_result({i - first: ack for i, ack in others.items() if first <= i < end} if others else {})
            first = end
        return True

    async def _stored(self, run: RunState | None, messages: list[_Message]) -> dict[int, AppendAck]:
        deltas = joined([one.deltas for one in messages])
        attempts = [attempt for one in messages for attempt in one.attempts]
        if run is not None and not run.mirror.reconciled.is_set():  # its data is broken: it pauses
            _supersede(run, deltas)
        elif run is not None:
            try:
                others = await self._known(run, deltas, new=all(one.follow_on for one in messages))
            except NotFound:
                pass  # the run's record has expired, and its attempts with it
            except UNEXPECTED as error:
                run.mirror.pause(error)
                _supersede(run, deltas)
            else:
                self._take_in(run, deltas, attempts, others)
                return others
        return deltas.superseded()

    async def _known(self, run: RunState, deltas: AppendColumns, *, new: bool) -> dict[int, AppendAck]:
        """Store all deltas except those of unconfirmed attempts, which are answered as stored with 0 tokens. `new`: see
        `AppendTopic.append`.
        """
        if not run.unconfirmed:
            return await self._store.appends.append(deltas, new=new)
        ids = enumerate(zip(deltas.rollouts, deltas.attempts, strict=True))
        held = {i: attempt for i, (rollout, attempt) in ids if run.is_unconfirmed(rollout, attempt)}
        rest = [i for i in range(len(deltas.attempts)) if i not in held]
        found = await self._store.appends.append(deltas.pick(rest)) if rest else {}
        kept = {i: AppendAck(attempt, AppendStatus.STORED, 0, False) for i, attempt in held.items()}
        return kept | {rest[i]: ack for i, ack in found.items()}

    def _take_in(
        self,
        run: RunState,
        deltas: AppendColumns,
        attempts: Sequence[RunningAttempt | None],
        others: dict[int, AppendAck],
    ) -> None:
        run.accept_tokens(attempts, deltas.ends)
        ended = [i for i in deltas.finishes if i not in others]
        for i, ack in others.items():
            if (attempt := attempts[i]) is not None and ack.status is not AppendStatus.SUPERSEDED:
                attempt.believe_stored(ack.stored)
            if ack.finished:
                ended.append(i)
            elif ack.status is AppendStatus.SUPERSEDED:
                _disown(run, deltas.rollouts[i], deltas.attempts[i])
        self._readers.push(deltas, others)
        if not ended:
            return
        over = ((deltas.rollouts[i], deltas.attempts[i]) for i in ended)
        before = self._store.link.durability.before()
        finished = [attempt for rollout, name in over if (attempt := run.finish(rollout, name, durable_before=before))]
        if finished:
            metrics.finished.inc(len(finished))
            for attempt in finished:
                metrics.rollout_attempts.observe(attempt.number)
            self._notifier.notify("finished", run.run_id)


def _count(messages: list[_Message], others: dict[int, AppendAck]) -> None:
    metrics.tokens.inc(sum(len(one.deltas.tokens) for one in messages) // TOKEN_BYTES)
    _OUTCOMES[AppendStatus.STORED].inc(sum(len(one.attempts) for one in messages) - len(others))
    for ack in others.values():
        _OUTCOMES[ack.status].inc()


def _supersede(run: RunState, deltas: AppendColumns) -> None:
    """End the attempts of a paused run. They go elsewhere later; streams go on with the tokens of other runs."""
    for rollout_id, attempt_id in zip(deltas.rollouts, deltas.attempts, strict=True):
        if run.is_unconfirmed(rollout_id, attempt_id):
            run.drop_unconfirmed(run.unconfirmed[rollout_id].attempt)
        _disown(run, rollout_id, attempt_id)


def _disown(run: RunState, rollout_id: str, attempt_id: str) -> None:
    """Orphan an attempt that its worker will drop, if the mirror still has it: the store is ahead of the mirror."""
    attempt = run.running.get(rollout_id)
    if attempt is not None and attempt.attempt_id == attempt_id and attempt.orphaned is None:
        unknown = EndReason(EndCause.NOT_HELD, "the store did not know the attempt any more")
        attempt.orphan(OrphanedAttempt(run.clock(), unknown))


def _next_batch(queue: list[_Message]) -> list[_Message]:
    """Take as many messages as one call may hold, at least one."""
    deltas = size = count = 0
    for message in queue:
        deltas, size = deltas + len(message.attempts), size + len(message.deltas.tokens)
        if count and (deltas > MAX_DELTAS or size > _CALL_BYTES):
            break
        count += 1
    batch = queue[:count]
    del queue[:count]
    return batch


def _drop_left(queue: list[_Message]) -> None:
    """Drop messages whose answer is not needed: their workers send them again."""
    for message in queue:
        if message.left:
            message.answer.cancel()
    queue[:] = [message for message in queue if not message.left]


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
                    stack.enter_context(session.append_stream.streaming())
                    cut.by(session)
                session.append_stream.message_came()
                try:
                    answer = await self._append(session, receiver, attempts, request)
                finally:
                    session.append_stream.message_answered()
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
                session.append_stream.tokens_came(self._state.clock())
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
        session.append_stream.stream_opened()
        self._stop()
        self._session, self._watch = session, asyncio.create_task(self._wait(session))

    async def _wait(self, session: WorkerSession) -> None:
        await session.append_stream.resend.wait()
        if self._reading is not None:
            self._made = True
            self._reading.cancel()

    async def next(self, messages: AsyncIterator[fleet_pb2.AppendRequest]) -> fleet_pb2.AppendRequest | None:
        """The next message; None at the end. Raises `StoreUnavailable` once the worker is to send again."""
        if self._session is not None and self._session.append_stream.resend.is_set():
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
        """Confirm what a later sample of the store shows to be durable."""
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
