"""Takes one version from snapshots to the relay: each rank encodes and uploads its share, rank 0 does the rest.

Invariant: ranks make the same exchanges in the same order: start, shares, then wanted and put blobs as often as needed.
A rank that fails or abandons the version reports it at the next exchange, so that all raise; rank 0 commits only when
the relay lacks nothing. Each message names its version, so ranks notice that they are out of step. When a rank dies,
the others' exchange fails, and the relay drops the stage.
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

#: Tile patches kept for the upload, as a share of the version's bytes; further ones are encoded again.
_KEPT: Final = 0.04


class UploadBase(Struct, frozen=True):
    """A version that the relay has confirmed, with this rank's bits."""

    version: int
    described: Described
    manifest: Manifest | None = None  # only on rank 0


class UploadResult(Struct, frozen=True, kw_only=True):
    """An announced version."""

    end: RankEnd
    encoded: Encoded
    encode_s: float
    upload_s: float


class VersionUpload:
    """Makes a publisher's `number`th version. Only rank 0 has a `head` and fills `start`; a rank's `failure` ends the
    version on all ranks."""

    def __init__(
        self,
        staging: VersionStaging,
        exchange: RankExchange,
        threads: int,
        number: int,
        start: RankStart,
        head: VersionAssembler | None,
        failure: Exception | None = None,
    ) -> None:
        self._staging, self._exchange, self._threads, self._number = staging, exchange, threads, number
        self.start, self.head, self._failure = start, head, failure
        self._own: asyncio.Future[Any] | None = None  # this rank's work between two exchanges
        self.given_up = False
        self._sent = 0  # bytes, since the last exchange

    def give_up(self) -> None:
        """Stop this rank's work; the exchange continues until all ranks know that the version is abandoned.

        Has no effect once nothing more is asked of this rank.
        """
        self.given_up = True
        self._failure = self._failure or self._gave_up()
        if self._own is not None:
            self._own.cancel()

    async def make(self, snapshot: TensorSnapshot, base: UploadBase | None) -> UploadResult:
        """Make the version from `snapshot`, whose changes are from `base`. Raises this rank's error or another's."""
        start = await self._told(RankStart(failure=RankFailure.of(self._failure)) if self._failure else self.start)
        began = time.monotonic()
        if start.failure is not None:
            raise self._failure or start.failure.error()
        encoding, share = await self._share(snapshot, base if base and base.version == start.base else None)
        encoded = time.monotonic()
        shares = await self._gathered(share)
        wanted = RankWanted()
        if self.head is not None:
            wanted = await self._decided(self.head.assemble(shares))
        while True:
            wanted = await self._told(wanted)
            if wanted.failure is not None:
                raise self._failure or (self.head and self.head.failed) or wanted.failure.error()
            if wanted.end is not None and share.encoded is not None:
                upload_s = time.monotonic() - encoded
                return UploadResult(end=wanted.end, encoded=share.encoded, encode_s=encoded - began, upload_s=upload_s)
            puts = await self._gathered(await self._put(encoding, wanted))
            if self.head is not None:
                wanted = await self._decided(self.head.go_on(puts))

    async def _share(self, snapshot: TensorSnapshot, base: UploadBase | None) -> tuple[Encoding | None, RankShare]:
        try:
            encoding = await self._unless_given_up(self._encode(snapshot, base))
            return encoding, RankShare(encoded=await asyncio.to_thread(encoding.result))
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
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
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            if self._failure is None and _curable(error):
                return RankPut(sent=self._sent, again=RankFailure.of(error))
            self._failure = error
        failure = RankFailure.of(self._failure) if self._failure else None
        return RankPut(sent=self._sent, missing=missing, failure=failure)

    def _count(self, size: int) -> None:
        self._sent += size

    async def _decided(self, work: Coroutine[Any, Any, RankWanted]) -> RankWanted:
        """Return rank 0's wishes; its own failures are part of them."""
        try:
            return await self._unless_given_up(work)
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            return RankWanted(failure=RankFailure.of(error))

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises this rank's failure: an earlier one at once, or the one that cancels `work`."""
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
        return Unavailable(f"rank {self._exchange.rank} abandoned the version; publish the next")

    async def _told(self, message: M) -> M:
        """Return rank 0's message; the `message` of other ranks only gives its kind."""
        data = await asyncio.to_thread(lambda: self._exchange.broadcast(pack(self._number, message)))
        return unpack(data, self._number, type(message))

    async def _gathered(self, message: M) -> list[M]:
        """Return, on rank 0, all ranks' messages. If a rank is gone or out of step, tells the others, then raises."""
        try:
            found = await asyncio.to_thread(lambda: self._exchange.gather(pack(self._number, message)))
            return [unpack(data, self._number, type(message)) for data in found]
        except (Unavailable, InvalidRequest) as error:
            if self.head is not None:
                with contextlib.suppress(Unavailable):
                    await self._told(RankWanted(failure=RankFailure.of(error)))
            raise


def _curable(error: Exception) -> bool:
    """Tell whether another try can help."""
    if isinstance(error, InvalidRequest):
        return error.field == "digest"  # the relay forgot the stage
    return isinstance(error, Unavailable | NoCapacity | NotReady | ChunkCorrupt)
