"""Serves readers: with manifests, patches and blobs, with ways to a version and sources for it, and over limited links.

Nothing of sources and links outlives the process, nor needs to.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final

from ebbtide.errors import ChunkCorrupt, InvalidRequest, PermissionDenied, VersionUnavailable
from ebbtide.transfer.sources import check_peer
from ebbtide.transfer.version_finder import FoundVersion, PathRequest
from ebbtide.types.weights import (
    NAME_CHARS,
    SITE_CHARS,
    FetchPath,
    LinkState,
    Manifest,
    Patch,
    PatchState,
    VersionInfo,
    VersionState,
    WeightsState,
)
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.holder_table import AGAIN_S, HolderTable
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_index import PatchEdge, VersionIndex
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.retention import Node
from ebbtide.weight_relay.subscription import Subscription
from ebbtide.weight_relay.upload_scheduler import LinkAsk, LinkRate, UploadScheduler
from ebbtide.weight_relay.version_paths import find_paths

#: How often a reader that waits for a blob keeps its stage alive, as a share of a stage's lifetime.
_SIGN_OF_LIFE: Final = 0.25
#: Links told apart. Readers of further links share one.
MAX_LINKS: Final = 256
OTHERS: Final = "others"


class VersionReader:
    """Reads manifests, patches, ways and blobs of committed and arriving versions, and announces new versions."""

    def __init__(self, library: VersionLibrary, collector: GarbageCollector, composer: PatchComposer) -> None:
        self._library, self._collector, self._composer = library, collector, composer

    def manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """The manifest of a committed or arriving version (0: the newest). Raises `VersionUnavailable`."""
        index, now = self._library.index, self._library.clock()
        manifest = index.readable_manifest(run_id, policy, version)
        number = manifest.version.version
        if stage := index.stage_of((run_id, policy), number, arriving=True):
            stage.used_at = now
        elif holding := index.stream((run_id, policy)).get(number):
            holding.used_at = now
        return manifest

    def patch(self, run_id: str, policy: str, base: int, version: int) -> Patch:
        """The patch between two versions. Raises `VersionUnavailable` if there is none."""
        if edge := self._library.index.patches((run_id, policy)).get((base, version)):
            edge.used_at = self._library.clock()
        return self._library.index.readable_patch((run_id, policy), (base, version))

    async def ways(
        self,
        run_id: str,
        policy: str,
        version: int,
        have: Iterable[int],
        *,
        scratch: bool = False,
        bytes_per_s: float = 0.0,
    ) -> list[FetchPath]:
        """Ways to a version (0: the newest) from those in `have`, cheapest first; with `scratch` from keyframes too.

        Composes the patches of the cheapest way if a reader that fetches at `bytes_per_s` (0: unknown) gains by it.
        Raises `VersionUnavailable` if the version is not here.
        """
        stream, index = (run_id, policy), self._library.index
        number = self.manifest(run_id, policy, version).version.version
        held = list(have)
        found = find_paths(*index.graph(stream), number, held, scratch=scratch)
        if found and len(found[0].via) > 1:
            await self._composer.improve(stream, found[0], bytes_per_s)
            found = find_paths(*index.graph(stream), number, held, scratch=scratch)
        if not found:
            raise VersionUnavailable(f"no way leads to version {number} of {policy} any more; ask for a newer one")
        return found

    async def tile(self, digest: bytes) -> bytes:
        """A blob, verified. Waits for it if an arriving version needs it. Raises `VersionUnavailable` if none has it.

        Raises `ChunkCorrupt` if the blob is damaged on disk; the versions that need it are then dropped.
        """
        await self._arrived(digest)
        try:
            with disk_errors():
                data = await asyncio.to_thread(self._library.read_verified, digest)
        except (FileNotFoundError, ChunkCorrupt) as error:
            raise await self._library.finish(self._collector.withdraw_blob(digest, str(error))) from None
        metrics.BYTES_OUT.inc(len(data))
        return data

    async def _arrived(self, digest: bytes) -> None:
        index = self._library.index
        while not index.serves(digest):
            stage = index.arriving(digest)
            if stage is None:
                raise VersionUnavailable(
                    f"no version held here has tile {digest[:32].hex()}; ask for the manifest again"
                )
            stage.used_at = self._library.clock()
            if digest in index.on_disk:
                return
            await self._library.arrival(digest, self._library.settings.stage_ttl_s * _SIGN_OF_LIFE)

    async def watch(self, run_id: str = "", policy: str = "") -> AsyncIterator[VersionInfo]:
        """Yield the versions held, oldest first, then each new one; of all runs and policies if none is named."""
        seen: set[Node] = set()
        while True:
            changed = self._library.changed
            held = self._held(run_id, policy)
            for node in sorted(held.keys() - seen):
                yield held[node]
            seen = set(held)
            await changed.wait()

    def _held(self, run_id: str, policy: str) -> dict[Node, VersionInfo]:
        index = self._library.index
        return {
            (stream, version): holding.info
            for stream in index.streams()
            if run_id in {"", stream[0]} and policy in {"", stream[1]}
            for version, holding in index.whole(stream).items()
        }


class LinkTable:
    """Limits and counts the bytes that this relay sends over each link.

    A link is its readers' site; without a site, it is the host that they call from.
    """

    def __init__(
        self, limits: Mapping[str, float], egress_limit: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limits`: bytes per second by site, "*" for any other; `egress_limit`: in all; 0 or none: no limit."""
        self._limits, self._clock = limits, clock
        self._turns = UploadScheduler(total=egress_limit, rate_of=self._limit, now=clock())
        self._sent: dict[str, LinkRate] = {}
        self._waiting: dict[LinkAsk, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def name(self, site: str, peer: str) -> str:
        """The link of a reader of `site` that calls from `peer` (gRPC's name of it)."""
        name = site or host_of(peer)
        if name not in self._sent and len(self._sent) >= MAX_LINKS:
            name = OTHERS
        self._sent.setdefault(name, LinkRate(self._clock()))
        return name

    async def turn(self, link: str, reader: str, size: int) -> None:
        """Wait until `size` bytes may be sent to `reader` over `link` (from `name`), and count them."""
        ask = LinkAsk(link, reader, size)
        turn = self._waiting[ask] = asyncio.get_running_loop().create_future()
        self._turns.add(ask, self._clock())
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(ask, None) is not None:
                self._turns.drop(ask)
            raise
        self._sent[link].add(size, self._clock())
        metrics.LINK_BYTES.labels(link).inc(size)

    def states(self) -> list[LinkState]:
        now = self._clock()
        return [
            LinkState(site=name, bytes=rate.total, bytes_per_s=rate.lately(now), limit=self._limit(name))
            for name, rate in sorted(self._sent.items())
        ]

    def _limit(self, link: str) -> float:
        return self._limits.get(link, self._limits.get("*", 0.0))

    def _give(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while ask := self._turns.next(self._clock()):
            if not (turn := self._waiting.pop(ask)).done():
                turn.set_result(None)
        wait = self._turns.wait(self._clock())
        if wait < math.inf:
            self._timer = asyncio.get_running_loop().call_later(wait, self._give)


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: ipv4:1.2.3.4:567, ipv6:[::1]:567 or unix:path."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else kind


class FanOut:
    """Sends readers to sources, asks the upstream for versions, and describes what each link carries."""

    def __init__(
        self,
        reader: VersionReader,
        index: VersionIndex,
        holders: HolderTable,
        links: LinkTable,
        subscription: Subscription | None,
    ) -> None:
        """`subscription`: to the upstream, if there is one."""
        self._reader, self._index, self.holders, self.links = reader, index, holders, links
        self._subscription = subscription

    async def ask(self, run_id: str, policy: str, version: int) -> int:
        """Bring a version from the upstream, if there is one; see `Subscription.ask`."""
        return version if self._subscription is None else await self._subscription.ask(run_id, policy, version)

    async def forget(self, run_id: str) -> None:
        """Bring nothing more of a run that has ended, and send no reader for it."""
        if self._subscription is not None:
            await self._subscription.forget(run_id)
        self.holders.forget(run_id)

    async def find(self, asked: PathRequest, *, peer: bool = True) -> FoundVersion:
        """Record a holder, and return ways and sources for it.

        `peer`: other readers may be sent to the caller. Otherwise an address is refused, since a reader that is sent
        there shows its token, and failures that the caller reports are not shared with other readers.
        Raises as `ask` and `VersionReader.ways`, `InvalidRequest` for an address that is no peer's, and
        `PermissionDenied` for an address of a caller that is no `peer`.
        """
        if asked.holder is not None and asked.holder.address:
            if not peer:
                raise PermissionDenied("holder.address: readers are sent to workers and relays alone; leave it empty")
            check_peer(asked.holder.address, field="holder.address")
        if asked.done:
            if not asked.version:
                raise InvalidRequest("must be named when it is held", field="version")
            known = self._index.knows(asked.stream)
            sources = self.holders.told(asked, asked.version, peer=peer) if known else []
            return FoundVersion((), tuple(sources), AGAIN_S)
        version = await self.ask(*asked.stream, asked.version)
        number = self._reader.manifest(*asked.stream, version).version.version
        # First of all: the version is being read from now on.
        sources = self.holders.told(asked, number, peer=peer)
        ways = await self._reader.ways(
            *asked.stream, number, asked.have, scratch=asked.scratch, bytes_per_s=asked.bytes_per_s
        )
        return FoundVersion(tuple(ways), tuple(sources), AGAIN_S)

    def reader(self, site: str, name: str, peer: str) -> Callable[[int], Awaitable[None]]:
        """Return a call that waits until so many bytes may be sent to a reader that calls from `peer`, and counts them.

        Raises `InvalidRequest` for names longer than a holder's.
        """
        for field, text, most in (("site", site, SITE_CHARS), ("reader", name, NAME_CHARS)):
            if len(text) > most:
                raise InvalidRequest(f"may have {most} characters", field=field)
        link = self.links.name(site, peer)
        return lambda size: self.links.turn(link, name or host_of(peer), size)

    def describe(self, run_id: str) -> WeightsState:
        """The state of all policies of a run: its versions here, their holders, and the links."""
        shown, more = self.holders.states(run_id)
        versions, links = tuple(self._versions(run_id)), tuple(self.links.states())
        return WeightsState(versions=versions, holders=tuple(shown), more_holders=more, links=links)

    def _versions(self, run_id: str) -> Iterator[VersionState]:
        """By policy, oldest first."""
        index, now = self._index, time.monotonic()
        for stream in sorted(stream for stream in index.streams() if stream[0] == run_id):
            edges = index.patches(stream)
            for number, holding in sorted(index.stream(stream).items()):
                patches = [_patch(edge) for (_, version), edge in sorted(edges.items()) if version == number]
                age_s = max(0.0, now - holding.since)
                yield VersionState(info=holding.info, keyframe=holding.keyframe, patches=tuple(patches), age_s=age_s)


def _patch(edge: PatchEdge) -> PatchState:
    patch = edge.patch
    density = patch.changed / patch.elements if patch.elements else 0.0
    return PatchState(base=patch.base.version, size=patch.size, density=density, composed=edge.composed)
