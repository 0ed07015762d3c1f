"""Whom readers are sent to, how much each link carries, and what comes from upstream: all beside the versions held.

Nothing of it outlives the process, or has to.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from msgspec import Struct

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.scheduling.distribution.source_ranking import BlobOrigin
from ebbtide.transfer.sources.tile_source import check_peer
from ebbtide.types.weights import NAME_CHARS, SITE_CHARS, BlobSource, FoundWay, Holder, WeightsState
from ebbtide.weight_relay.outlets.holder_table import AGAIN_S, HolderTable, WayRequest
from ebbtide.weight_relay.outlets.link_table import LinkTable, host_of
from ebbtide.weight_relay.outlets.version_description import describe
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weight_relay.settings_checks import check_settings, is_url
from ebbtide.weight_relay.upstream.relay_upstream import RelayUpstream, Upstream
from ebbtide.weight_relay.upstream.subscription import Subscription


class FoundWays(Struct, frozen=True):
    """What FindWay answers."""

    ways: tuple[FoundWay, ...]
    sources: tuple[BlobSource, ...]
    again_s: float = AGAIN_S


class FanOut:
    def __init__(self, relay: WeightRelay) -> None:
        """Raises `InvalidRequest` for settings that cannot be, naming the field."""
        self._relay, settings = relay, relay.settings
        limits = check_settings(settings)
        origin = BlobOrigin(site=settings.site, trainers=not settings.upstream)
        self.holders = HolderTable(origin, settings.static_copies)
        self.links = LinkTable(limits, settings.egress_limit)
        relay.needed, relay.lasting = self.holders.needed, self.holders.lasting
        self._upstream = _upstream(settings, relay) if settings.upstream else None
        self._subscription = (
            Subscription(relay, self.holders, self._upstream, settings.upstream_runs) if self._upstream else None
        )

    async def run(self) -> None:
        """For ever: bring here what comes upstream; without an upstream there is nothing to do."""
        if self._subscription is not None:
            await self._subscription.run()

    async def ask(self, run_id: str, policy: str, version: int) -> int:
        """Have a version brought that is not here, if there is an upstream; what to read (`Subscription.ask`)."""
        return version if self._subscription is None else await self._subscription.ask(run_id, policy, version)

    async def forget(self, run_id: str) -> None:
        """A run has ended: nothing of it comes any more, and nobody is sent for it."""
        if self._subscription is not None:
            await self._subscription.forget(run_id)
        self.holders.forget(run_id)

    async def find(self, asked: WayRequest, *, peer: bool = True) -> FoundWays:
        """Ways and sources for a holder, which is known from now on. `peer`: others may be sent to who asks; else an
        address is refused, since whoever is sent there shows a token, and what failed who asks is told to nobody.

        Raises as `ask` and `WeightRelay.ways`, `InvalidRequest` for a holder whose address is none that others may be
        sent to, and `PermissionDenied` for one that is of no peer.
        """
        if asked.holder is not None and asked.holder.address:
            if not peer:
                raise PermissionDenied("holder.address: readers are sent to workers and relays alone; leave it empty")
            check_peer(asked.holder.address, field="holder.address")
        if asked.done:
            if not asked.version:
                raise InvalidRequest("must be named when it is held", field="version")
            if not self._relay.index.knows(asked.stream):
                return FoundWays((), ())
            return FoundWays((), tuple(self.holders.told(asked, asked.version, peer=peer)))
        version = await self.ask(*asked.stream, asked.version)
        number = self._relay.manifest(*asked.stream, version).version.version
        # Before anything is waited for: the version is being read from now.
        sources = self.holders.told(asked, number, peer=peer)
        ways = await self._relay.ways(
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
        return describe(self._relay.index, self.holders, self.links, run_id, time.monotonic())

    async def close(self) -> None:
        if self._upstream is not None:
            with suppress(asyncio.CancelledError):
                await self._upstream.close()


def _upstream(settings: RelaySettings, relay: WeightRelay) -> Upstream:
    name = settings.name or f"{socket.gethostname()}/{settings.server.listen}"
    # A relay's disk is no memory that others could share: it is of no host.
    holder = Holder(name=name, site=settings.site, address=settings.advertise, lasting=True)
    if is_url(settings.upstream):
        from ebbtide.weight_relay.upstream.static_upstream import StaticUpstream

        return StaticUpstream(settings.upstream, settings.upstream_security, holder, relay.limits)
    return RelayUpstream(settings.upstream, settings.upstream_security, holder, relay.limits)
