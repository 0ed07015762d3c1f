"""Brings a mirror to one version, in rounds: ask for ways, plan, fetch.

Invariant: of a round, only the mirror's tiles, the refused ways and the lists of the others outlive it; so any error
may end it, and the next round begins from what is there. Nobody is told that a version is held before all of it is.
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
from ebbtide.transfer.fetch_batches import FetchWork
from ebbtide.transfer.mirror_fetch import FetchMeans, FetchOrder, MirrorFetch
from ebbtide.transfer.sources.source_pool import OpenSource, SourcePool
from ebbtide.transfer.sources.tile_source import Opener
from ebbtide.transfer.version_finder import FoundVersion, VersionFinder, VersionQuestion, is_usable
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
        """`bytes_per_s`: at which the reader has fetched lately; 0 if that is not known."""
        self.reused: int | None = None  # tiles that were the version's already
        self.ways: list[FoundWay] = []
        self._order, self._finder, self._means, self._bytes_per_s = order, finder, means, bytes_per_s
        self._threads, self._wanted = means.threads, order.places()
        self._pool = SourcePool(relay, open_source, reader, means.rates)
        self.fetch = MirrorFetch(order, self._pool, means)
        self._lists: dict[FoundWay, Way] = {}
        self._refused: set[FoundWay] = set()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def round(self) -> None:
        """Ask, plan and fetch once. Raises why not all is there; what has been done is kept."""
        order, version, cache = self._order, self._order.target.version, self._means.cache
        await self._threads.run(order.mirror.mend)
        have = self._have()
        with ExitStack() as peers:
            with cache.planning():
                found = await self._ask(have)  # from here on, peers may be sent here
                work = await self._plan(found, have, await self._threads.run(order.mirror.held))
                peers.enter_context(cache.arriving(work.sizes))
            if self.reused is None:
                self.reused = len(self._wanted) - work.tiles
            order.mirror.remember(order.target.run_id, version.policy, [*have, version.version])
            await self._fetch(work, found.again_s)
        if order.wanted is None:
            order.mirror.remember(order.target.run_id, version.policy, [version.version])
            with suppress(EbbtideError):  # the relay hears of it when this holder says that it serves, or installs
                await self._finder.find(self._question([version.version], done=True))

    async def _fetch(self, work: FetchWork, again_s: float) -> None:
        if broken := await self.fetch.run(work, lambda: self._ask(self._have()), again_s):
            # The blobs were right and what came of them was not: the base was damaged, or the lists lie.
            await self._threads.run(lambda: self._order.mirror.mend(broken))
            self._refused.update(way for way in self._lists if way.via)
            self._scratch = True
            raise ChunkCorrupt(f"{len(broken)} tiles are not the version's after their patches")

    # -- where it comes from -------------------------------------------------------------------------------------

    def _have(self) -> list[int]:
        return self._order.mirror.versions(self._order.target.run_id, self._order.target.version.policy)

    def _question(self, have: list[int], *, done: bool = False) -> VersionQuestion:
        target = self._order.target
        return VersionQuestion(
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
        return await self._pool.ask(lambda: self._finder.find(self._question(have)))

    async def _plan(self, found: FoundVersion, have: list[int], held: dict[Place, bytes]) -> FetchWork:
        """The work along the first ways that lead everywhere. Raises `VersionUnavailable` if none do."""
        order, wanted = self._order, self._wanted
        ways: list[Way] = []
        work = await self._threads.run(lambda: FetchWork(order.target, ways, wanted, held))
        kind = ChunkCorrupt if self._refused else VersionUnavailable
        failure: EbbtideError = kind(f"{len(work.lost)} tiles cannot be had: no way is known that leads to them")
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
            self._scratch = True  # what is held is not all of what it was: ask for ways from anywhere
            found = await self._ask(have)
        return work

    async def _way(self, found: FoundWay) -> Way:
        if found not in self._lists:
            target, publisher = self._order.target, self._order.publisher
            self._lists[found] = await self._finder.way(found, target, publisher=publisher)
        if found not in self.ways:
            self.ways.append(found)
        return self._lists[found]
