"""Brings a mirror to one version in rounds: each asks for ways, plans, and fetches.

Invariant: only the mirror's tiles, the refused ways and the lists of the others outlive a round. So any error may end
it, and the next round goes on from there. The relay hears that a version is held only when all of it is.
"""

from contextlib import ExitStack, suppress

from ebbtide.errors import (
    ChunkCorrupt,
    EbbtideError,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    VersionUnavailable,
)
from ebbtide.transfer.blob_fetcher import BlobFetcher, FetchMeans
from ebbtide.transfer.fetch_batches import FetchWork
from ebbtide.transfer.mirror_sink import FetchOrder, MirrorSink
from ebbtide.transfer.sources.source_pool import OpenSource, SourcePool
from ebbtide.transfer.sources.tile_source import Opener
from ebbtide.transfer.version_finder import FoundVersion, VersionFinder, WayRequest, is_usable
from ebbtide.types.weights import FoundWay, Holder
from ebbtide.weights import Place, Way


class Pull:
    def __init__(
        self,
        order: FetchOrder,
        finder: VersionFinder,
        relay: OpenSource,
        open_source: Opener,
        reader: Holder,
        means: FetchMeans,
        bytes_per_s: float,
    ) -> None:
        """`bytes_per_s`: the reader's rate lately; 0: not known."""
        self.reused: int | None = None  # tiles that were the version's already
        self.ways: list[FoundWay] = []  # that were used, the latest last
        self._order, self._finder, self._means, self._bytes_per_s = order, finder, means, bytes_per_s
        self._threads, self._wanted = means.threads, order.places()
        self._pool = SourcePool(relay, open_source, reader, means.rates)
        self.sink = MirrorSink(order, means)
        self._lists: dict[FoundWay, Way] = {}
        self._refused: set[FoundWay] = set()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def round(self) -> None:
        """Ask, plan and fetch once. Raises why not all tiles are there; what is done is kept."""
        order, version, cache = self._order, self._order.target.version, self._means.cache
        await self._threads.run(order.mirror.mend)
        have = self._have()
        with ExitStack() as peers:
            with cache.planning():
                found = await self._ask(have)  # from here on the relay may send peers here
                work = await self._plan(found, have, await self._threads.run(order.mirror.held))
                peers.enter_context(cache.arriving(work.sizes))
            if self.reused is None:
                self.reused = len(self._wanted) - work.tiles
            order.mirror.remember(order.target.run_id, version.policy, [*have, version.version])
            await self._fetch(work, found.again_s)
        if order.wanted is None:
            order.mirror.remember(order.target.run_id, version.policy, [version.version])
            with suppress(EbbtideError):  # the relay hears of it later: when this holder serves or installs it
                await self._finder.find(self._request([version.version], done=True))

    async def _fetch(self, work: FetchWork, again_s: float) -> None:
        sink, means = self.sink, self._means
        sink.broken.clear()
        fetcher = BlobFetcher(work.batches(means.streams), sink.take, self._pool, means)
        try:
            await fetcher.run(lambda: self._ask(self._have()), again_s)
        finally:
            sink.digests_s += fetcher.digests_s
        if broken := sink.broken:
            # The blobs were right and the tiles were not: the base was damaged, or the lists lie.
            await self._threads.run(lambda: self._order.mirror.mend(broken))
            self._refused.update(way for way in self._lists if way.via)
            self._scratch = True
            raise ChunkCorrupt(f"{len(broken)} tiles are not the version's after their patches")

    # -- where it comes from -------------------------------------------------------------------------------------

    def _have(self) -> list[int]:
        return self._order.mirror.versions(self._order.target.run_id, self._order.target.version.policy)

    def _request(self, have: list[int], *, done: bool = False) -> WayRequest:
        target = self._order.target
        return WayRequest(
            run_id=target.run_id,
            policy=target.version.policy,
            version=target.version.version,
            have=tuple(have),
            bytes_per_s=self._bytes_per_s,
            failed=self._pool.failed,
            done=done,
            scratch=self._scratch and not done,
        )

    async def _ask(self, have: list[int]) -> FoundVersion:
        return await self._pool.ask(lambda: self._finder.find(self._request(have)))

    async def _plan(self, found: FoundVersion, have: list[int], held: dict[Place, bytes]) -> FetchWork:
        """Plan along the first ways that reach every place. Raises `VersionUnavailable` if none do."""
        order, wanted = self._order, self._wanted
        ways: list[Way] = []
        work = await self._threads.run(lambda: FetchWork(order.target, ways, wanted, held))
        kind = ChunkCorrupt if self._refused else VersionUnavailable
        failure: EbbtideError = kind(f"{len(work.lost)} tiles cannot be made: no way to them is known")
        while work.lost:
            for way in found.ways:
                if way in self._refused or not is_usable(way, have):
                    continue
                try:
                    ways.append(await self._way(way))
                except (InvalidRequest, ChunkCorrupt, PermissionDenied, NotReady) as error:
                    failure = error
                    continue
                work = await self._threads.run(lambda: FetchWork(order.target, ways, wanted, held))
                if not work.lost:
                    return work
            if self._scratch:
                raise failure
            self._scratch = True  # the mirror has lost tiles: ask for ways from anywhere
            found = await self._ask(have)
        return work

    async def _way(self, found: FoundWay) -> Way:
        if found not in self._lists:
            target, publisher = self._order.target, self._order.publisher
            manifests, patches = await self._finder.way(found, target, publisher=publisher)
            self._lists[found] = Way(manifests[0], patches, found.anchor)
        if found not in self.ways:
            self.ways.append(found)
        return self._lists[found]
