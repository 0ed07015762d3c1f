"""The append path: from a worker's message to stored and acknowledged tokens.

One store call per message and run; the bytes of the tokens are not looked at. A store that is away holds the message
back until it is there again, and with it that worker's stream alone.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Final

from ebbtide.coordinator import metrics
from ebbtide.coordinator.bells import Bells
from ebbtide.coordinator.fleet import Fleet
from ebbtide.coordinator.state import Orphaned, RunState, State
from ebbtide.errors import InvalidRequest, NotFound, StoreUnavailable
from ebbtide.rpc.retry import pauses
from ebbtide.store.appends import Ack, Delta
from ebbtide.store.store import Store
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2

#: Deltas of one message: a script's arguments must fit on Lua's stack.
MAX_DELTAS: Final = 1024
#: What `everysec` may lose, and a margin for a slow fsync.
_EVERYSEC_S: Final = 2.0
_SUPERSEDED: Final = Ack(AppendStatus.SUPERSEDED, 0, False)
_OUTCOMES: Final = {status: status.name.lower() for status in AppendStatus}


class Appending:
    """`fsync`: when the store's acknowledged writes are on disk; see `Condition`."""

    def __init__(self, state: State, store: Store, fleet: Fleet, bells: Bells, *, fsync: str) -> None:
        self._state, self._store, self._fleet, self._bells = state, store, fleet, bells
        self._everysec = fsync == "everysec"

    async def stream(self, requests: AsyncIterator[fleet_pb2.AppendRequest]) -> AsyncIterator[fleet_pb2.AppendResponse]:
        """Answer a worker's messages in their order."""
        if not self._everysec:
            async for request in requests:
                yield await self.append(request)
            return
        out: asyncio.Queue[fleet_pb2.AppendResponse | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, out))
        try:
            while (response := await out.get()) is not None:
                yield response
            reader.result()
        finally:
            reader.cancel()

    async def _read(
        self,
        requests: AsyncIterator[fleet_pb2.AppendRequest],
        out: "asyncio.Queue[fleet_pb2.AppendResponse | None]",
    ) -> None:
        """Answer at once, and again when the answer has become durable."""
        loop = asyncio.get_running_loop()
        try:
            async for request in requests:
                response = await self.append(request)
                out.put_nowait(response)
                durable = fleet_pb2.AppendResponse(sequence=response.sequence, acks=response.acks, durable=True)
                loop.call_later(_EVERYSEC_S, out.put_nowait, durable)
        finally:
            out.put_nowait(None)

    async def append(self, request: fleet_pb2.AppendRequest) -> fleet_pb2.AppendResponse:
        """Store one message. Raises `NotFound` for a session that is over, `InvalidRequest`."""
        start = time.monotonic()
        self._fleet.session(request.session)
        by_run: dict[str, list[int]] = defaultdict(list)
        if len(request.deltas) > MAX_DELTAS:
            raise InvalidRequest(f"at most {MAX_DELTAS} in one message", field="deltas")
        deltas = [self._checked(index, delta) for index, delta in enumerate(request.deltas)]
        for index, delta in enumerate(request.deltas):
            by_run[delta.attempt.run_id].append(index)
        acks: list[Ack] = [_SUPERSEDED] * len(deltas)
        calls = [self._store_all(run_id, [deltas[i] for i in indices]) for run_id, indices in by_run.items()]
        for indices, found in zip(by_run.values(), await asyncio.gather(*calls), strict=True):
            for index, ack in zip(indices, found, strict=True):
                acks[index] = ack
        _count(deltas, acks, time.monotonic() - start)
        answers = [_answer(delta.attempt, ack) for delta, ack in zip(request.deltas, acks, strict=True)]
        return fleet_pb2.AppendResponse(sequence=request.sequence, acks=answers, durable=not self._everysec)

    def _checked(self, index: int, delta: fleet_pb2.Delta) -> Delta:
        ref, field = delta.attempt, f"deltas[{index}]"
        if len(delta.tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"no run of {TOKEN_BYTES}-byte token records", field=f"{field}.tokens")
        run = self._state.runs.get(ref.run_id)
        attempt = run.running.get(ref.rollout_id) if run else None
        most = attempt.max_tokens if attempt and attempt.attempt_id == ref.attempt_id else None
        if most is not None and delta.offset + len(delta.tokens) // TOKEN_BYTES > most:
            raise InvalidRequest(f"more than the rollout's max_tokens ({most})", field=f"{field}.tokens")
        if delta.finish not in {0, FinishReason.STOP, FinishReason.LENGTH}:
            raise InvalidRequest("a worker ends a rollout by STOP or LENGTH", field=f"{field}.finish")
        finish = FinishReason(delta.finish) if delta.finish else None
        return Delta(ref.rollout_id, ref.attempt_id, delta.offset, delta.tokens, finish)

    async def _store_all(self, run_id: str, deltas: list[Delta]) -> list[Ack]:
        run = self._state.runs.get(run_id)
        if run is None:
            return [_SUPERSEDED] * len(deltas)
        for pause in pauses(0.05, 1.0):
            try:
                acks = await self._store.appends.append(run_id, deltas)
            except NotFound:
                return [_SUPERSEDED] * len(deltas)
            except StoreUnavailable:
                await asyncio.sleep(pause)
                continue
            self._take_in(run, deltas, acks)
            return acks
        raise AssertionError("pauses do not end")

    def _take_in(self, run: RunState, deltas: list[Delta], acks: list[Ack]) -> None:
        finished = 0
        for delta, ack in zip(deltas, acks, strict=True):
            if ack.finished:
                finished += run.end(delta.rollout_id, delta.attempt_id) is not None
            elif ack.status is AppendStatus.SUPERSEDED:
                self._disowned(run, delta)
            self._bells.ring("tokens", run.run_id, delta.rollout_id)
        if finished:
            metrics.finished.inc(finished)
            self._bells.ring("finished", run.run_id)
            self._state.wake.set()

    def _disowned(self, run: RunState, delta: Delta) -> None:
        """The worker will drop this attempt: if the mirror still has it, the mirror is behind the store."""
        attempt = run.running.get(delta.rollout_id)
        if attempt is not None and attempt.attempt_id == delta.attempt_id and attempt.orphaned is None:
            attempt.orphan(Orphaned(time.monotonic(), "the store did not know the attempt any more", False))
            self._state.reap.set()


def _count(deltas: list[Delta], acks: list[Ack], seconds: float) -> None:
    metrics.append_seconds.observe(seconds)
    metrics.tokens.inc(sum(len(delta.tokens) for delta in deltas) // TOKEN_BYTES)
    for status, number in Counter(ack.status for ack in acks).items():
        metrics.appends.labels(_OUTCOMES[status]).inc(number)


def _answer(attempt: fleet_pb2.AttemptRef, ack: Ack) -> fleet_pb2.AppendAck:
    status = fleet_pb2.AppendAck.Status.ValueType(ack.status)
    return fleet_pb2.AppendAck(attempt=attempt, status=status, stored=ack.stored, finished=ack.finished)
