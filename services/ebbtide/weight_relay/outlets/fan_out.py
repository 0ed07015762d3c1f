"""Sends readers to sources, asks the upstream for versions, and limits, counts and describes what each link carries.

Nothing here outlives the process, nor needs to.
"""

import time
from collections.abc import Awaitable, Callable, Iterator

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.transfer.sources.tile_source import check_peer
from ebbtide.transfer.version_finder import FoundVersion, WayRequest
from ebbtide.types.weights import NAME_CHARS, SITE_CHARS, PatchState, VersionState, WeightsState
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.library.version_records import PatchEdge
from ebbtide.weight_relay.outlets.holder_table import AGAIN_S, HolderTable
from ebbtide.weight_relay.outlets.link_table import LinkTable, host_of
from ebbtide.weight_relay.outlets.version_reader import VersionReader
from ebbtide.weight_relay.upstream.subscription import Subscription


class FanOut:
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

    async def find(self, asked: WayRequest, *, peer: bool = True) -> FoundVersion:
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
                yield VersionState(info=holding.info, anchor=holding.anchor, patches=tuple(patches), age_s=age_s)


def _patch(edge: PatchEdge) -> PatchState:
    patch = edge.patch
    density = patch.changed / patch.elements if patch.elements else 0.0
    return PatchState(base=patch.base.version, size=patch.size, density=density, composed=edge.composed)
