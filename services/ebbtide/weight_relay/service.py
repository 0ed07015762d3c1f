"""Builds the parts of a relay, and starts and ends them in order. Each use case has its own module."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ebbtide import telemetry
from ebbtide.errors import EbbtideError
from ebbtide.scheduling.distribution.source_ranking import BlobOrigin
from ebbtide.types.weights import Holder
from ebbtide.weight_relay.intake.anchor_builder import AnchorBuilder
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.ended_runs import EndedRuns
from ebbtide.weight_relay.library.publisher_trust import PublisherTrust, known_keys
from ebbtide.weight_relay.library.relay_disk import RelayDisk
from ebbtide.weight_relay.library.run_end_follower import RunEndFollower, source_of
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.library.version_retirement import VersionRetirement
from ebbtide.weight_relay.outlets.fan_out import FanOut
from ebbtide.weight_relay.outlets.holder_table import HolderTable
from ebbtide.weight_relay.outlets.link_table import LinkTable
from ebbtide.weight_relay.outlets.version_reader import VersionReader
from ebbtide.weight_relay.servicer import RelayServicer
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weight_relay.settings_checks import check_settings, is_url
from ebbtide.weight_relay.upstream.relay_upstream import RelayUpstream, Upstream
from ebbtide.weight_relay.upstream.subscription import Subscription
from ebbtide.weights import ManifestLimits

log = telemetry.get_logger(__name__)


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
        self.retirement = VersionRetirement(self.library, self.keys, self.holders)
        self.anchors = AnchorBuilder(self.library, self.retirement, self.codecs)
        self.composer = PatchComposer(self.library, self.retirement, self.codecs)
        self.intake = VersionIntake(self.library, self.retirement, self.keys, self.codecs, self.ended, self.anchors)
        self.reader = VersionReader(self.library, self.retirement, self.composer)
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
            self.retirement, self.ended, self.fanout, source_of(settings), keep_ended_s=settings.keep_ended_s
        )
        self.servicer = RelayServicer(self.intake, self.reader, self.fanout, self.ends, self.library.limits)

    async def open(self) -> None:
        """Find the versions in the directory. Checks sizes alone; reads check digests.

        Raises `InvalidRequest` for a file that can be neither read nor deleted.
        """
        await self.keys.open()
        await self.library.open()
        self.retirement.spare_found()
        async with self.library.lock:
            await self.retirement.tidy()
        self.anchors.consider()

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
        await self.anchors.close()
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
                await self.library.finish(self.retirement.drop_dead_stages())
            except (EbbtideError, OSError) as error:
                log.warning("sweep failed", error=str(error))
            self.anchors.consider()


def _upstream(settings: RelaySettings, limits: ManifestLimits) -> Upstream:
    name = settings.name or f"{socket.gethostname()}/{settings.server.listen}"
    # Readers cannot share a relay's disk as they share a host's memory, so it names no host.
    holder = Holder(name=name, site=settings.site, address=settings.advertise, lasting=True)
    if is_url(settings.upstream):
        from ebbtide.weight_relay.upstream.static_upstream import StaticUpstream

        return StaticUpstream(settings.upstream, settings.upstream_security, holder, limits)
    return RelayUpstream(settings.upstream, settings.upstream_security, holder, limits)
