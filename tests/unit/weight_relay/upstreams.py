"""An upstream in memory, whose versions and sources answer as a test wants."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from ebbtide.errors import EbbtideError, Unavailable, VersionUnavailable
from ebbtide.transfer.sources import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion, PathLists, PathRequest
from ebbtide.types.weights import BlobSource, FetchPath, Holder, Manifest, VersionInfo
from ebbtide.weight_relay.retention import Stream
from tests.integration.weight_relay.lines import Line


class Blobs:
    """A source of all tiles of a line, which first answers with `errors`, one for each call."""

    def __init__(self, line: Line, *errors: EbbtideError) -> None:
        self._tiles = {digest: tile for version in line for digest, tile in version.tiles.items()}
        self._errors = list(errors)
        self.calls = 0
        self.open = asyncio.Event()
        self.open.set()

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        self.calls += 1
        await self.open.wait()
        if self._errors:
            raise self._errors.pop(0)
        for digest in digests:
            yield digest, self._tiles[digest]

    async def close(self) -> None:
        """Nothing is open."""


class LineUpstream:
    """Has versions 1 to `newest` of a line, dense, but for those in `gone`, and tells no manifest of those in `broken`;
    `asked` are those whose manifests were asked for, in order."""

    target = "a line"

    def __init__(self, line: Line, newest: int, *errors: EbbtideError, peers: Sequence[BlobSource] = ()) -> None:
        self._line, self.newest, self._peers = line, newest, peers
        self.blobs, self.peers_blobs = Blobs(line), Blobs(line, *errors)
        self.news: asyncio.Queue[int] = asyncio.Queue()
        self.asked: list[int] = []
        self.gone: set[int] = set()
        self.broken: set[int] = set()

    async def close(self) -> None:
        """Nothing is open."""

    def publish(self, number: int) -> None:
        self.newest = max(self.newest, number)
        self.news.put_nowait(number)

    def pool(self) -> SourcePool:
        itself = OpenSource(self.blobs, "upstream", "up:1", UNLISTED)
        return SourcePool(itself, lambda _source, _reader: self.peers_blobs, Holder(name="me", site="here"))

    async def watch(self) -> AsyncIterator[VersionInfo]:
        while True:
            yield VersionInfo(run_id="run", version=self._line[await self.news.get()].manifest.version)

    async def find(self, request: PathRequest) -> FoundVersion:
        if request.done:
            return FoundVersion()
        number = request.version or self.newest
        if number > self.newest or number in self.gone:
            raise VersionUnavailable(f"version {number} is not there")
        return FoundVersion((FetchPath(start=number, keyframe=True),), tuple(self._peers), 1.0)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        self.asked.append(version)
        if version in self.broken:
            raise Unavailable("broken")
        return self._line[version].manifest

    async def way(self, found: FetchPath, target: Manifest) -> PathLists:
        return (target,), ()
