"""Storing what messages bring: those of one run that come close behind one another go to the store together.

Invariant: of a run there is one call at a time, with what came since the last one, in the order in which it came; so a
stream's messages, which it hands over one by one, keep theirs. A call is made at once if the last one was made a while
ago. A store that is away holds a run's messages back until it is there again and knows what lives on. What was not
answered when this process dies was stored or was not: workers send it again.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.coordinator_state import (
    CoordinatorState,
    OrphanedAttempt,
    RunningAttempt,
    RunState,
    WorkerSession,
)
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.errors import NotFound, StoreUnavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.store.rollout_rows import EndReason
from ebbtide.store.store import Store
from ebbtide.store.topics.append_topic import AppendColumns, joined
from ebbtide.types.append_delta import AppendAck
from ebbtide.types.end_cause import EndCause
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.wire.append_columns import MAX_DELTAS

#: From one call of a run to the next, at least: a call costs the store a turn and an fsync, whatever is in it.
_GATHER_S: Final = 0.005
#: Bytes of one call, unless one message alone has more.
_CALL_BYTES: Final = 4 << 20


class _Message:
    """Deltas, what the mirror has of each one's attempt, and the answer: what was not stored as it was sent.

    `left`: the stream that brought it is over, and nobody waits for the answer.
    """

    def __init__(self, deltas: AppendColumns, attempts: Sequence[RunningAttempt | None]) -> None:
        self.deltas, self.attempts = deltas, attempts
        self.answer: asyncio.Future[dict[int, AppendAck]] = asyncio.get_running_loop().create_future()
        self.left = False


class AppendBatcher:
    def __init__(self, state: CoordinatorState, store: Store, bells: Notifier) -> None:
        self._state, self._store, self._bells = state, store, bells
        self._lines: dict[str, list[_Message]] = {}  # by run; a run is here while it has a task
        self._tasks: set[asyncio.Task[None]] = set()

    async def keep(
        self, session: WorkerSession, deltas: AppendColumns, attempts: Sequence[RunningAttempt | None]
    ) -> dict[int, AppendAck]:
        """Store deltas of one run. Returns, by their place, those that were not stored as they were sent."""
        message = _Message(deltas, attempts)
        run_id = deltas.attempts[0].run_id
        if (line := self._lines.get(run_id)) is not None:
            line.append(message)
        else:
            self._lines[run_id] = [message]
            task = asyncio.create_task(self._empty(run_id), name=f"append {run_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(message.answer)
        except asyncio.CancelledError:
            message.left = True
            if not message.answer.done():  # the worker's attempts are not re-queued before it is seen to
                hold = ExitStack()
                hold.enter_context(session.appending())
                message.answer.add_done_callback(lambda _: hold.close())
            raise

    async def _empty(self, run_id: str) -> None:
        line = self._lines[run_id]
        waits = pauses(0.05, 1.0)
        try:
            while line:
                again = time.monotonic() + _GATHER_S
                run = self._state.runs.get(run_id)
                if run is not None:
                    await run.settled.wait()
                if await self._call(run, messages := _taken(line)):
                    waits = pauses(0.05, 1.0)
                else:
                    line[:0] = messages
                    await asyncio.sleep(next(waits))
                    _forget_left(line)
                if (pause := again - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
        finally:
            del self._lines[run_id]
            for message in line:
                message.answer.cancel()

    async def _call(self, run: RunState | None, messages: list[_Message]) -> bool:
        """Store messages at once, and answer each; False if the store is away."""
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
        first = 0
        for one in messages:
            end = first + len(one.attempts)
            one.answer.set_result({i - first: ack for i, ack in others.items() if first <= i < end} if others else {})
            first = end
        return True

    async def _stored(self, run: RunState | None, messages: list[_Message]) -> dict[int, AppendAck]:
        deltas = joined([one.deltas for one in messages])
        if run is not None:
            with suppress(NotFound):
                others = await self._known(run, deltas)
                attempts = [attempt for one in messages for attempt in one.attempts]
                self._take_in(run, deltas, attempts, others)
                return others
        return {
            i: AppendAck(ref.attempt_id, AppendStatus.SUPERSEDED, 0, False) for i, ref in enumerate(deltas.attempts)
        }

    async def _known(self, run: RunState, deltas: AppendColumns) -> dict[int, AppendAck]:
        """Store all but what is of rollouts that the store forgot: of these it has nothing, for now."""
        if not run.widows:
            return await self._store.appends.append(run.run_id, deltas)
        held = {i: ref for i, ref in enumerate(deltas.attempts) if run.is_widow(ref)}
        rest = [i for i in range(len(deltas.attempts)) if i not in held]
        found = await self._store.appends.append(run.run_id, deltas.pick(rest)) if rest else {}
        kept = {i: AppendAck(ref.attempt_id, AppendStatus.STORED, 0, False) for i, ref in held.items()}
        return kept | {rest[i]: ack for i, ack in found.items()}

    def _take_in(
        self,
        run: RunState,
        deltas: AppendColumns,
        attempts: Sequence[RunningAttempt | None],
        others: dict[int, AppendAck],
    ) -> None:
        for attempt, offset, count in zip(attempts, deltas.offsets, deltas.counts, strict=True):
            if attempt is not None:
                run.made += max(0, offset + count - attempt.stored)
                attempt.stored = offset + count
        ended = [i for i in deltas.finishes if i not in others]
        for i, ack in others.items():
            if (attempt := attempts[i]) is not None and ack.status is not AppendStatus.SUPERSEDED:
                attempt.stored = ack.stored
            if ack.finished:
                ended.append(i)
            elif ack.status is AppendStatus.SUPERSEDED:
                self._disowned(run, deltas.attempts[i])
        over = (deltas.attempts[i] for i in ended)
        lasts_s = self._state.life.durable_after_s
        finished = [
            attempt for ref in over if (attempt := run.finish(ref.rollout_id, ref.attempt_id, durable_after_s=lasts_s))
        ]
        self._bells.ring_all("tokens", run.run_id, (ref.rollout_id for ref in deltas.attempts))
        if finished:
            metrics.finished.inc(len(finished))
            for attempt in finished:
                metrics.rollout_attempts.observe(attempt.number)
            self._bells.ring("finished", run.run_id)
            self._state.wake.set()

    def _disowned(self, run: RunState, ref: AttemptRef) -> None:
        """The worker will drop this attempt: if the mirror still has it, the mirror is behind the store."""
        attempt = run.running.get(ref.rollout_id)
        if attempt is not None and attempt.attempt_id == ref.attempt_id and attempt.orphaned is None:
            unknown = EndReason(EndCause.NOT_HELD, "the store did not know the attempt any more")
            attempt.orphan(OrphanedAttempt(time.monotonic(), unknown))
            self._state.reap.set()


def _taken(line: list[_Message]) -> list[_Message]:
    """Take from a run's messages what one call may hold, one message at least."""
    deltas = size = count = 0
    for message in line:
        deltas, size = deltas + len(message.attempts), size + len(message.deltas.tokens)
        if count and (deltas > MAX_DELTAS or size > _CALL_BYTES):
            break
        count += 1
    taken = line[:count]
    del line[:count]
    return taken


def _forget_left(line: list[_Message]) -> None:
    """A store that was away need not take what nobody waits for: its worker sends it again."""
    for message in line:
        if message.left:
            message.answer.cancel()
    line[:] = [message for message in line if not message.left]
