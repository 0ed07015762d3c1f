"""Serves the trainer that owns the device: its wishes, and what became of them.

Invariant: one stream owns the device, the newest of the newest lease; the others are ended. A stream that ends leaves
the device to be lent, unless its owner comes back at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest, NotReady, Superseded
from ebbtide.scheduling.elastic.device_ownership import DeviceClaim, DeviceOwnership, OwnerLease
from ebbtide.serving_guard.trainer import metrics
from ebbtide.serving_guard.trainer.loan_keeper import LoanKeeper
from ebbtide.types.ids import check_id
from ebbtide.types.loans import LOANS_VERSION, LoanState, OwnerWish
from ebbtide.v1 import loans_pb2 as pb
from ebbtide.wire.record_conversion import from_proto, to_proto

log = telemetry.get_logger(__name__)

#: An owner that opens a stream states its wish within this time.
_WISH_S: Final = 5.0
#: How often the state is looked at: while the owner waits for its device, and otherwise.
_AWAITED_S: Final = 0.002
_LOOK_S: Final = 0.1
#: How often a state is repeated, as a sign of life: a trainer whose guard hangs looks into the pages itself.
_REPEAT_S: Final = 0.5


class _Owner:
    """One stream's claim and newest wish."""

    def __init__(self, claim: DeviceClaim, wish: OwnerWish) -> None:
        self.claim, self.wish = claim, wish
        self.news = asyncio.Event()


class OwnerStream:
    """Serves the streams of all owners; a servicer's `Own` is its `serve`."""

    def __init__(
        self,
        ownership: DeviceOwnership,
        keeper: LoanKeeper,
        *,
        engine_bytes: Callable[[], int] = lambda: 0,
        record: Callable[[Iterable[OwnerLease]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine_bytes()`: of the device that an engine needs to come back. `record`: keeps leases for later."""
        self._ownership, self._keeper, self._clock = ownership, keeper, clock
        self._engine_bytes, self._record = engine_bytes, record

    async def serve(self, requests: AsyncIterator[pb.OwnerWish]) -> AsyncGenerator[pb.LoanState, None]:
        """Let one trainer own the device until its stream ends. Raises `InvalidRequest`, `NotReady`, `Superseded`."""
        owner = self._claim(await _first(requests))
        reader = asyncio.create_task(self._read(requests, owner))
        try:
            told, told_at = None, 0.0
            while not reader.done():
                state = self._state(owner)
                if state != told or self._clock() - told_at >= _REPEAT_S:
                    told, told_at = state, self._clock()
                    yield to_proto(state, pb.LoanState)
                await self._pause(owner, reader, state)
            reader.result()
        finally:
            reader.cancel()
            self._ownership.broke(self._clock(), owner.claim)
            log.info("the owner's stream ended", run_id=owner.wish.run_id, lease=owner.wish.lease)

    def _claim(self, wish: OwnerWish) -> _Owner:
        if wish.protocol_version != LOANS_VERSION:
            raise NotReady(f"this guard speaks version {LOANS_VERSION} of the loans, not {wish.protocol_version}")
        check_id(wish.run_id, field="run_id")
        lease = OwnerLease(wish.run_id, wish.lease, wish.owner)
        try:
            claim = self._ownership.claim(self._clock(), lease, lends=wish.lend)
        except (Superseded, NotReady) as error:
            metrics.OWNERS_REFUSED.labels("superseded" if isinstance(error, Superseded) else "owned").inc()
            raise
        self._record(self._ownership.newest())
        log.info("the device has an owner", run_id=wish.run_id, lease=wish.lease)
        self._keeper.wished(wish.spell_s, hand_over=wish.hand_over)
        return _Owner(claim, wish)

    async def _read(self, requests: AsyncIterator[pb.OwnerWish], owner: _Owner) -> None:
        async for message in requests:
            wish, old = from_proto(message, OwnerWish), owner.wish
            if (wish.run_id, wish.lease, wish.owner) != (old.run_id, old.lease, old.owner):
                raise InvalidRequest("the owner stays the same for all of a stream; open another one", field="lease")
            if wish.sequence < old.sequence:
                raise InvalidRequest(f"must not fall; {old.sequence} was before", field="sequence")
            self._ownership.wish(self._clock(), owner.claim, lends=wish.lend)
            owner.wish = wish
            if wish.sequence > old.sequence:
                self._keeper.wished(wish.spell_s, hand_over=wish.hand_over)
                owner.news.set()

    def _state(self, owner: _Owner) -> LoanState:
        """What became of the newest wish. Raises `Superseded` if another stream owns the device."""
        self._ownership.check(owner.claim)
        wish, back = owner.wish, self._keeper.back
        return LoanState(
            sequence=wish.sequence,
            compute_back=back.compute and not wish.lend,
            memory_back=back.memory and not wish.lend,
            waits_for="" if wish.lend else back.waits_for,
            repeat_s=_REPEAT_S,
            engine_bytes=self._engine_bytes(),
        )

    async def _pause(self, owner: _Owner, reader: asyncio.Task[None], state: LoanState) -> None:
        """Wait for a new wish, the stream's end or the next look."""
        awaited = not owner.wish.lend and not state.memory_back
        news = asyncio.ensure_future(owner.news.wait())
        try:
            timeout = _AWAITED_S if awaited else _LOOK_S
            await asyncio.wait((news, reader), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        owner.news.clear()


async def _first(requests: AsyncIterator[pb.OwnerWish]) -> OwnerWish:
    first = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_WISH_S):
            first = await anext(requests, None)
    if first is None:
        raise InvalidRequest("the owner states its wish first", field="sequence")
    return from_proto(first, OwnerWish)
