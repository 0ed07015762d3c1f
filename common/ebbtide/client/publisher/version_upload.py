"""One version on its way from snapshots to the relay: each rank encodes and uploads its own, rank 0 does the rest.

Invariant: ranks make the same exchanges in the same order: start, shares, then as often as it takes what is wanted and
what was put. A rank that fails, or gives the version up, tells so at the next one, so that all raise, and rank 0
commits only when the relay lacks nothing. Each message says of which version it is: ranks that are out of step know it.
When a rank dies the others' exchange ends, and the relay drops what was staged.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from msgspec import Struct

from ebbtide.client.publisher.rank_exchange import (
    M,
    RankEnd,
    RankExchange,
    RankFailure,
    RankPut,
    RankShare,
    RankStart,
    RankWanted,
    pack,
    unpack,
)
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.client.publisher.version_assembler import VersionAssembler
from ebbtide.client.publisher.version_staging import VersionStaging
from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.types.weights import Manifest
from ebbtide.weights.version_encoding import Described, Encoded, Encoding, same_pieces

T = TypeVar("T")

#: Tile patches that are kept for the upload, by the bytes of the version: more are encoded again.
_KEPT: Final = 0.04


class UploadBase(Struct, frozen=True):
    """A version that the relay has confirmed, as this rank holds it; `manifest` on rank 0 alone."""

    version: int
    described: Described
    manifest: Manifest | None = None


class UploadResult(Struct, frozen=True, kw_only=True):
    """A version that is announced."""

    end: RankEnd
    encoded: Encoded
    encode_s: float
    upload_s: float


class VersionUpload:
    """Makes the `number`th version of a publisher. `head` is rank 0's; `failure`: why this rank has no snapshot."""

    def __init__(
        self,
        staging: VersionStaging,
        exchange: RankExchange,
        threads: int,
        number: int,
        head: VersionAssembler | None,
        failure: Exception | None = None,
    ) -> None:
        self._staging, self._exchange, self._threads, self._head = staging, exchange, threads, head
        self._number, self._failure = number, failure
        self._own: asyncio.Future[Any] | None = None  # what is done here now, between exchanges
        self.given_up = False
        self._sent = 0  # by this upload

    def give_up(self) -> None:
        """End what is done here; the exchange goes on until all know that there will be no such version.

        It comes too late where nothing more is asked of this rank.
        """
        self.given_up = True
        self._failure = self._failure or self._gave_up()
        if self._own is not None:
            self._own.cancel()

    async def make(self, start: RankStart, snapshot: TensorSnapshot, base: UploadBase | None) -> UploadResult:
        """Raises what this rank or another met; `start` is rank 0's. What `snapshot` follows is `base`."""
        start = await self._told(RankStart(failure=RankFailure.of(self._failure)) if self._failure else start)
        began = time.monotonic()
        if start.failure is not None:
            raise self._failure or start.failure.error()
        encoding, share = await self._share(snapshot, base if base and base.version == start.base else None)
        encoded = time.monotonic()
        shares = await self._gathered(share)
        wanted = RankWanted()
        if self._head is not None:
            wanted = await self._decided(self._head.assemble(shares))
        while True:
            wanted = await self._told(wanted)
            if wanted.failure is not None:
                raise self._failure or (self._head and self._head.failed) or wanted.failure.error()
            if wanted.end is not None and share.encoded is not None:
                upload_s = time.monotonic() - encoded
                return UploadResult(end=wanted.end, encoded=share.encoded, encode_s=encoded - began, upload_s=upload_s)
            puts = await self._gathered(await self._put(encoding, wanted))
            if self._head is not None:
                wanted = await self._decided(self._head.go_on(puts))

    async def _share(self, snapshot: TensorSnapshot, base: UploadBase | None) -> tuple[Encoding | None, RankShare]:
        try:
            encoding = await self._unless_given_up(self._encode(snapshot, base))
            return encoding, RankShare(encoded=await asyncio.to_thread(encoding.result))
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised here when they know
            self._failure = error
            return None, RankShare(failure=RankFailure.of(error))

    async def _encode(self, snapshot: TensorSnapshot, base: UploadBase | None) -> Encoding:
        found, tensors = await asyncio.to_thread(snapshot.fetch), snapshot.tensors
        known = base.described if base and same_pieces(tensors, base.described.entries) else None
        keep = int(_KEPT * sum(tensor.data.nbytes for tensor in tensors))
        encoding = Encoding(tensors, known, keep_bytes=keep, found=found)
        threads = [asyncio.to_thread(encoding.work) for _ in range(self._threads)]
        try:
            for outcome in await asyncio.gather(*threads, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        finally:
            encoding.stop()
        return encoding

    async def _put(self, encoding: Encoding | None, wanted: RankWanted) -> RankPut:
        self._sent, missing = 0, None
        own = [digest for digest in wanted.digests if encoding.has(digest)] if encoding is not None else []
        try:
            if encoding is not None and wanted.version is not None and own:
                put = self._staging.put(wanted.version, encoding, own, self._count)
                missing = await self._unless_given_up(put)
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised here when they know
            if self._failure is None and _curable(error):
                return RankPut(sent=self._sent, again=RankFailure.of(error))
            self._failure = error
        failure = RankFailure.of(self._failure) if self._failure else None
        return RankPut(sent=self._sent, missing=missing, failure=failure)

    def _count(self, size: int) -> None:
        self._sent += size

    async def _decided(self, work: Coroutine[Any, Any, RankWanted]) -> RankWanted:
        """What rank 0 wants of all. Its own failures are in there already."""
        try:
            return await self._unless_given_up(work)
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised here when they know
            return RankWanted(failure=RankFailure.of(error))

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises why this rank publishes nothing: at once if it knows before, else when that is what cancels `work`."""
        if self._failure is not None:
            work.close()
            raise self._failure
        own: asyncio.Future[T] = asyncio.ensure_future(work)
        self._own = own
        try:
            return await own
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.given_up or (task is not None and task.cancelling()):
                raise
            raise self._gave_up() from None

    def _gave_up(self) -> Unavailable:
        return Unavailable(f"rank {self._exchange.rank} gave the version up; publish the next")

    async def _told(self, message: M) -> M:
        """What rank 0 says; the others' `message` only tells of which kind it is."""
        data = await asyncio.to_thread(lambda: self._exchange.broadcast(pack(self._number, message)))
        return unpack(data, self._number, type(message))

    async def _gathered(self, message: M) -> list[M]:
        """On rank 0: what all say. If one of them is gone or out of step, the others are told before that is raised."""
        try:
            found = await asyncio.to_thread(lambda: self._exchange.gather(pack(self._number, message)))
            return [unpack(data, self._number, type(message)) for data in found]
        except (Unavailable, InvalidRequest) as error:
            if self._head is not None:
                with contextlib.suppress(Unavailable):
                    await self._told(RankWanted(failure=RankFailure.of(error)))
            raise


def _curable(error: Exception) -> bool:
    """Whether another try may help."""
    if isinstance(error, InvalidRequest):
        return error.field == "digest"  # the stage was forgotten
    return isinstance(error, Unavailable | NoCapacity | NotReady | ChunkCorrupt)
