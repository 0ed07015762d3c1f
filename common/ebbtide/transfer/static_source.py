"""Reads blobs from a static copy on any web server or object store that honours byte ranges.

Below its URL lie the files of `ebbtide.weights.static_index`. The puller checks each blob.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import numpy as np
from msgspec import Struct

from ebbtide.errors import ChunkCorrupt, EbbtideError, Unavailable, VersionUnavailable
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.static_index import HEAD, INDEX, RECORD, blobs_file, index_records

#: As many blobs as a manifest may have tiles.
_MOST_INDEX: Final = len(HEAD) + RECORD.size * (4 << 20)
#: Unneeded bytes that are read to save a request, and the most bytes of one request.
_GAP: Final = 32 << 10
_SPAN: Final = 8 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)


class BlobSpan(Struct, frozen=True, order=True):
    """The place of a blob in a file."""

    file: int
    offset: int
    size: int
    digest: bytes


class StaticIndex:
    """A checked index; finds blobs by their digests."""

    def __init__(self, data: bytes) -> None:
        """Raises `ChunkCorrupt` for another format."""
        self._records = index_records(data)
        records = np.frombuffer(self._records, np.uint8).reshape(-1, RECORD.size)
        self._keys = np.ascontiguousarray(records[:, :8]).view(">u8").reshape(-1)

    def spots(self, digests: Sequence[bytes]) -> list[BlobSpan]:
        """The places of blobs, in order. Raises `VersionUnavailable` if one is missing."""
        keys = np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
        rows = np.searchsorted(self._keys, keys)
        return [self._spot(int(row), digest) for row, digest in zip(rows, digests, strict=True)]

    def _spot(self, row: int, digest: bytes) -> BlobSpan:
        for at in range(row, min(row + 4, len(self._keys))):
            found, size, file, offset = RECORD.unpack_from(self._records, at * RECORD.size)
            if found == digest and size <= TILE_BYTES:
                return BlobSpan(file, offset, size, digest)
        raise VersionUnavailable(f"blob {digest.hex()[:16]} is not in the static copy")


class StaticSource:
    """The static copy at a URL; a `TileSource`. Its session begins with the first request."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._index: StaticIndex | None = None
        self._loading = asyncio.Lock()

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        for span in spans(await self._find(digests)):
            async for found in self._read(span):
                yield found

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _find(self, digests: Sequence[bytes]) -> list[BlobSpan]:
        before = self._index
        if before is not None:
            try:
                return before.spots(digests)
            except VersionUnavailable:
                pass  # the copy may have grown since
        async with self._loading:
            if self._index is before:
                self._index = StaticIndex(await self._load())
        return self._index.spots(digests) if self._index is not None else []

    async def _load(self) -> bytes:
        async with self._get(INDEX) as answer:
            if answer.status != 200:
                raise self._refused(INDEX, answer.status)
            data = bytearray()
            async for part in answer.content.iter_chunked(1 << 18):
                data += part
                if len(data) > _MOST_INDEX:
                    raise ChunkCorrupt(f"{self._url}/{INDEX} has more than {_MOST_INDEX} bytes")
            return bytes(data)

    async def _read(self, span: Sequence[BlobSpan]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        first, end = span[0].offset, max(spot.offset + spot.size for spot in span)
        name = blobs_file(span[0].file)
        async with self._get(name, {"Range": f"bytes={first}-{end - 1}"}) as answer:
            if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(
                f"bytes {first}-{end - 1}/"
            ):
                raise self._refused(name, answer.status)
            at = first
            for spot in span:
                await answer.content.readexactly(spot.offset - at)
                yield spot.digest, await answer.content.readexactly(spot.size)
                at = spot.offset + spot.size

    @asynccontextmanager
    async def _get(self, name: str, headers: dict[str, str] | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            # Nothing is decoded, since ranges are of the stored bytes. Redirects would lead to hosts that no one named.
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        identity: dict[str, Any] = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            async with self._session.get(f"{self._url}/{name}", headers=identity, allow_redirects=False) as answer:
                yield answer
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise Unavailable(f"static copy at {self._url} broke off ({type(error).__name__}: {error})") from None

    def _refused(self, name: str, status: int) -> EbbtideError:
        if status == 404:
            return VersionUnavailable(f"{self._url} has no {name}")
        return Unavailable(f"{self._url}/{name} answered {status} to a request for a range; does it honour ranges?")


def spans(spots: Sequence[BlobSpan]) -> Iterator[list[BlobSpan]]:
    """Group spots into requests: neighbours in one file, each spot once."""
    span: list[BlobSpan] = []
    for spot in sorted(set(spots)):
        if span:
            end = span[-1].offset + span[-1].size
            near = spot.file == span[0].file and end <= spot.offset <= end + _GAP
            if not near or spot.offset + spot.size - span[0].offset > _SPAN:
                yield span
                span = []
        span.append(spot)
    if span:
        yield span
