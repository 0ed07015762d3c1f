"""Builds the parts of a relay, and starts and ends them in order. Each use case has its own module."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from ebbtide import telemetry
from ebbtide.auth.security import is_loopback
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.rpc.channel import check_address
from ebbtide.rpc.leader_channel import addresses
from ebbtide.transfer.sources import check_peer
from ebbtide.types.weights import Holder
from ebbtide.weight_relay.holder_table import HolderTable
from ebbtide.weight_relay.intake.keyframe_builder import KeyframeBuilder
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.garbage_collector import GarbageCollector
from ebbtide.weight_relay.library.publisher_trust import PublisherTrust, known_keys
from ebbtide.weight_relay.library.relay_disk import RelayDisk
from ebbtide.weight_relay.library.run_ends import EndedRuns, RunEndFollower, source_of
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.servicer import RelayServicer
from ebbtide.weight_relay.serving import FanOut, LinkTable, VersionReader
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weight_relay.source_ranking import BlobOrigin
from ebbtide.weight_relay.subscription import RelayUpstream, Subscription, Upstream
from ebbtide.weight_relay.upload_scheduler import parse_limits
from ebbtide.weights import ManifestLimits

log = telemetry.get_logger(__name__)

_WILDCARDS = {"0.0.0.0", "[::]", "::"}  # noqa: S104 - compared with, not listened at


class WeightRelay:
    """The parts of one relay. `run` it between `open` and `close`."""

    def __init__(self, settings: RelaySettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `InvalidRequest` for wrong settings, naming the field."""
        limits, given = check_settings(settings), known_keys(settings.publisher_keys)
        disk = RelayDisk(Path(settings.data_dir))
        self.library = VersionLibrary(settings, disk, clock)
        self.keys = PublisherTrust(disk, given, allow_unsigned=settings.allow_unsigned)
        self.ended = EndedRuns(clock)
        self.holders = HolderTable(
            BlobOrigin(site=settings.site, trainers=not settings.upstream), settings.static_copies
        )
        # Fetches and commits have the other half of the cores.
        self.codecs = TileCodecs(settings.codec_threads or max(1, (os.cpu_count() or 1) // 2))
        self.collector = GarbageCollector(self.library, self.keys, self.holders)
        self.keyframes = KeyframeBuilder(self.library, self.collector, self.codecs)
        self.composer = PatchComposer(self.library, self.collector, self.codecs)
        self.intake = VersionIntake(self.library, self.collector, self.keys, self.codecs, self.ended, self.keyframes)
        self.reader = VersionReader(self.library, self.collector, self.composer)
        self._upstream = _upstream(settings, self.library.limits) if settings.upstream else None
        self._subscription = (
            Subscription(
                self.intake, self.library.index, self.ended, self.holders, self._upstream, settings.upstream_runs
            )
            if self._upstream
            else None
        )
        links = LinkTable(limits, settings.egress_limit)
        self.fanout = FanOut(self.reader, self.library.index, self.holders, links, self._subscription)
        self.ends = RunEndFollower(
            self.collector, self.ended, self.fanout.forget, source_of(settings), keep_ended_s=settings.keep_ended_s
        )
        self.servicer = RelayServicer(self.intake, self.reader, self.fanout, self.ends, self.library.limits)

    async def open(self) -> None:
        """Find the versions in the directory. Checks sizes alone; reads check digests.

        Raises `InvalidRequest` for a file that can be neither read nor deleted.
        """
        await self.keys.open()
        await self.library.open()
        self.collector.spare_found()
        async with self.library.lock:
            await self.collector.tidy()
        self.keyframes.consider()

    async def run(self) -> None:
        """Follow the upstream and the ends of runs, and drop what is too old or abandoned, for ever."""
        async with asyncio.TaskGroup() as tasks:
            if self._subscription is not None:
                tasks.create_task(self._subscription.run())
            tasks.create_task(self.ends.run())
            tasks.create_task(self._sweep())

    async def close(self) -> None:
        """Let changes under way finish, then give up the directory."""
        if self._upstream is not None:
            with suppress(asyncio.CancelledError):
                await self._upstream.close()
        await self.keyframes.close()
        await self.composer.close()
        await self.library.close()
        await asyncio.to_thread(self.codecs.close)

    async def _sweep(self) -> None:
        """Drop the stages of silent publishers, and versions that are too old, for ever.

        What a failing disk does not delete is tried again the next time.
        """
        while True:
            await asyncio.sleep(self.library.settings.stage_ttl_s / 4)
            try:
                await self.library.finish(self.collector.drop_dead_stages())
            except (EbbtideError, OSError) as error:
                log.warning("sweep failed", error=str(error))
            self.keyframes.consider()


def _upstream(settings: RelaySettings, limits: ManifestLimits) -> Upstream:
    name = settings.name or f"{socket.gethostname()}/{settings.server.listen}"
    # Readers cannot share a relay's disk as they share a host's memory, so it names no host.
    holder = Holder(name=name, site=settings.site, address=settings.advertise, lasting=True)
    if settings.follows_copy:
        from ebbtide.weight_relay.static_copy import StaticUpstream

        return StaticUpstream(settings.upstream, settings.upstream_security, holder, limits)
    return RelayUpstream(settings.upstream, settings.upstream_security, holder, limits)


def check_settings(settings: RelaySettings) -> Mapping[str, float]:
    """Check settings before a reader or a publisher meets the mistake. Returns the limits of links, by site.

    Raises `InvalidRequest` for wrong settings, naming the field.
    """
    try:
        limits = parse_limits(settings.link_limits)
    except ValueError as error:
        raise InvalidRequest(str(error), field="link_limits") from None
    if settings.static_copies and settings.upstream:
        text = "is for a relay without an upstream; name the copy as `upstream`, or to the relay that is followed"
        raise InvalidRequest(text, field="static_copies")
    for url in settings.static_copies:
        _check_url(url, "static_copies")
    if settings.advertise:
        check_peer(settings.advertise, field="advertise")
    if settings.coordinator:
        addresses(settings.coordinator)
    if settings.follows_copy:
        _check_url(settings.upstream, "upstream")
    elif settings.upstream:
        check_address(settings.upstream, field="upstream")
        _check_another(settings)
    return limits


def _check_url(text: str, field: str) -> None:
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{text!r} is no URL of a static copy: give http(s)://HOST/FOLDER", field=field)


def _check_another(settings: RelaySettings) -> None:
    own = [address for address in (settings.server.listen, settings.advertise) if address]
    if any(_same(settings.upstream, address) for address in own):
        text = f"{settings.upstream} is this relay's own address; name the relay that it is to follow"
        raise InvalidRequest(text, field="upstream")


def _same(upstream: str, own: str) -> bool:
    """Whether both are surely one server on this host."""
    if upstream == own:
        return True
    (host, _, port), (own_host, _, own_port) = upstream.rpartition(":"), own.rpartition(":")
    if port != own_port or "unix" in (host, own_host):
        return False
    here = is_loopback(upstream) or host in (socket.gethostname(), *_WILDCARDS)
    return here and (own_host in _WILDCARDS or is_loopback(own))
