"""One version on its way from snapshots to the relay: each rank encodes and uploads its own, rank 0 does the rest.

Invariant: ranks make the same exchanges in the same order: start, shares, then as often as it takes what is wanted and
what was put. A rank that fails tells so at the next one, so that all raise, and rank 0 commits only when the relay
lacks nothing. When a rank dies the others' exchange ends, and the relay drops what was staged.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.client.exchange import End, Exchange, Failure, M, Put, Share, Start, Wanted, pack, unpack
from ebbtide.client.head import Head
from ebbtide.client.snapshots import Snapshot
from ebbtide.client.staging import Staging
from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.types.weights import Manifest
from ebbtide.weights.encode import Described, Encoded, Encoding, same_pieces

#: Tile patches that are kept for the upload, by the bytes of the version: more are encoded again.
_KEPT: Final = 0.04


class Base(Struct, frozen=True):
    """A version that the relay has confirmed, as this rank holds it; `manifest` on rank 0 alone."""

    version: int
    described: Described
    manifest: Manifest | None = None


class Made(Struct, frozen=True, kw_only=True):
    """A version that is announced."""

    end: End
    encoded: Encoded
    encode_s: float
    upload_s: float


class Making:
    """Makes one version. `head` is rank 0's; `failure`: why this rank has no snapshot to publish."""

    def __init__(
        self, staging: Staging, exchange: Exchange, threads: int, head: Head | None, failure: Exception | None = None
    ) -> None:
        self._staging, self._exchange, self._threads, self._head = staging, exchange, threads, head
        self._failure = failure

    async def make(self, start: Start, snapshot: Snapshot, base: Base | None) -> Made:
        """Raises what this rank or another met; `start` is rank 0's. What `snapshot` follows is `base`."""
        start = await self._told(start)
        began = time.monotonic()
        if start.failure is not None:
            raise self._failure or start.failure.error()
        encoding, share = await self._share(snapshot, base if base and base.version == start.base else None)
        encoded = time.monotonic()
        shares = await self._gathered(share)
        wanted = Wanted()
        if self._head is not None:
            wanted = await self._head.assemble(shares)
        while True:
            wanted = await self._told(wanted)
            if wanted.failure is not None:
                raise self._failure or (self._head and self._head.failed) or wanted.failure.error()
            if wanted.end is not None and share.encoded is not None:
                upload_s = time.monotonic() - encoded
                return Made(end=wanted.end, encoded=share.encoded, encode_s=encoded - began, upload_s=upload_s)
            puts = await self._gathered(await self._put(encoding, wanted.digests))
            if self._head is not None:
                wanted = await self._head.go_on(puts)

    async def _share(self, snapshot: Snapshot, base: Base | None) -> tuple[Encoding | None, Share]:
        if self._failure is not None:
            return None, Share(failure=Failure.of(self._failure))
        try:
            encoding = await self._encode(snapshot, base)
            return encoding, Share(encoded=await asyncio.to_thread(encoding.result))
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised here when they know
            self._failure = error
            return None, Share(failure=Failure.of(error))

    async def _encode(self, snapshot: Snapshot, base: Base | None) -> Encoding:
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

    async def _put(self, encoding: Encoding | None, digests: Sequence[bytes]) -> Put:
        sent = 0
        own = [digest for digest in digests if encoding.has(digest)] if encoding is not None else []
        try:
            if encoding is not None and own:
                async for size in self._staging.put(encoding, own):
                    sent += size
        except (Unavailable, NoCapacity, NotReady, ChunkCorrupt) as error:
            return Put(sent=sent, again=Failure.of(error))
        except Exception as error:  # noqa: BLE001 - told to the other ranks, and raised here when they know
            if isinstance(error, InvalidRequest) and error.field == "digest":  # the stage was forgotten
                return Put(sent=sent, again=Failure.of(error))
            self._failure = error
            return Put(sent=sent, failure=Failure.of(error))
        return Put(sent=sent)

    async def _told(self, message: M) -> M:
        """What rank 0 says; the others' `message` only tells of which kind it is."""
        return await asyncio.to_thread(lambda: unpack(self._exchange.broadcast(pack(message)), type(message)))

    async def _gathered(self, message: M) -> list[M]:
        """On rank 0: what all say. If one of them is gone, the others are told before that is raised."""
        try:
            return await asyncio.to_thread(
                lambda: [unpack(data, type(message)) for data in self._exchange.gather(pack(message))]
            )
        except Unavailable as error:
            if self._head is not None:
                with contextlib.suppress(Unavailable):
                    await self._told(Wanted(failure=Failure.of(error)))
            raise
