"""Sends readers to sources, has versions brought from upstream, and counts and limits what each link carries.

Nothing of it outlives the process, or has to.
"""

import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.transfer.sources.tile_source import check_peer
from ebbtide.types.weights import NAME_CHARS, SITE_CHARS, BlobSource, FoundWay, WeightsState
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.outlets.holder_table import AGAIN_S, HolderTable, WayRequest
from ebbtide.weight_relay.outlets.link_table import LinkTable, host_of
from ebbtide.weight_relay.outlets.version_description import describe
from ebbtide.weight_relay.outlets.version_reader import VersionReader
from ebbtide.weight_relay.upstream.subscription import Subscription


class FoundWays(Struct, frozen=True):
    """What FindWay answers."""

    ways: tuple[FoundWay, ...]
    sources: tuple[BlobSource, ...]
    again_s: float = AGAIN_S


class FanOut:
    def __init__(
        self,
        reading: VersionReader,
        index: VersionIndex,
        holders: HolderTable,
        links: LinkTable,
        subscription: Subscription | None,
    ) -> None:
        """`subscription`: to the upstream, if there is one."""
        self._reading, self._index, self.holders, self.links = reading, index, holders, links
        self._subscription = subscription

    async def ask(self, run_id: str, policy: str, version: int) -> int:
        """Have a version brought that is not here, if there is an upstream; what to read (`Subscription.ask`)."""
        return version if self._subscription is None else await self._subscription.ask(run_id, policy, version)

    async def forget(self, run_id: str) -> None:
        """A run has ended: nothing of it comes any more, and nobody is sent for it."""
        if self._subscription is not None:
            await self._subscription.forget(run_id)
        self.holders.forget(run_id)

    async def find(self, asked: WayRequest, *, peer: bool = True) -> FoundWays:
        """Ways and sources for a holder, which is known from now on.

        `peer`: other readers may be sent to the caller. Otherwise an address is refused, since a reader that is sent
        there shows its token, and failures that the caller reports are not shared with other readers.
        Raises as `ask` and `VersionReader.ways`, `InvalidRequest` for a holder whose address is none that others may
        be sent to, and `PermissionDenied` for one that is of no peer.
        """
        if asked.holder is not None and asked.holder.address:
            if not peer:
                raise PermissionDenied("holder.address: readers are sent to workers and relays alone; leave it empty")
            check_peer(asked.holder.address, field="holder.address")
        if asked.done:
            if not asked.version:
                raise InvalidRequest("must be named when it is held", field="version")
            if not self._index.knows(asked.stream):
                return FoundWays((), ())
            return FoundWays((), tuple(self.holders.told(asked, asked.version, peer=peer)))
        version = await self.ask(*asked.stream, asked.version)
        number = self._reading.manifest(*asked.stream, version).version.version
        # Before anything is waited for: the version is being read from now.
        sources = self.holders.told(asked, number, peer=peer)
        ways = await self._reading.ways(
            *asked.stream, number, asked.have, scratch=asked.scratch, bytes_per_s=asked.bytes_per_s
        )
        return FoundWays(tuple(ways), tuple(sources))

    def reader(self, site: str, name: str, peer: str) -> Callable[[int], Awaitable[None]]:
        """What waits until so many bytes may be sent to a reader that calls from `peer`, and counts them.

        Raises `InvalidRequest` for names longer than a holder's.
        """
        for field, text, most in (("site", site, SITE_CHARS), ("reader", name, NAME_CHARS)):
            if len(text) > most:
                raise InvalidRequest(f"may have {most} characters", field=field)
        link = self.links.name(site, peer)
        return lambda size: self.links.turn(link, name or host_of(peer), size)

    def describe(self, run_id: str) -> WeightsState:
        return describe(self._index, self.holders, self.links, run_id, time.monotonic())
