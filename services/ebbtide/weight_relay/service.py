"""The relay's use-cases, each in a module of its own, over one shelf: stage, fill, commit, read, find ways, let go.

Invariant: see `shelf`. This object only puts them together.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, VersionUnavailable
from ebbtide.scheduling.distribution.version_paths import find_ways
from ebbtide.types.weights import FoundWay, Manifest, Patch, PolicyVersion, VersionInfo
from ebbtide.weight_relay.intake.anchor_builder import AnchorBuilder
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.ended_runs import EndedRuns
from ebbtide.weight_relay.library.publisher_trust import PublisherTrust, known_keys
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.library.version_records import Node, Stream
from ebbtide.weight_relay.library.version_retirement import VersionRetirement
from ebbtide.weight_relay.outlets.version_reader import VersionReader
from ebbtide.weight_relay.settings import RelaySettings

log = telemetry.get_logger(__name__)


class WeightRelay:
    def __init__(self, settings: RelaySettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        keys = known_keys(settings.publisher_keys)
        self._shelf = VersionLibrary(settings, clock)
        self.limits = self._shelf.limits
        # Half of the cores: fetches and commits have the others.
        self._codecs = TileCodecs(settings.codec_threads or max(1, (os.cpu_count() or 1) // 2))
        self._keys = PublisherTrust(self._shelf.disk, keys, allow_unsigned=settings.allow_unsigned)
        self._shelf.pins = lambda: self._keys.pins
        self.ended = EndedRuns(clock)
        self._retiring = VersionRetirement(self._shelf)
        self._publishing = VersionIntake(self._shelf, self._retiring, self._keys, self._codecs, self.ended)
        self._reading = VersionReader(self._shelf, self._retiring)
        self._anchors = AnchorBuilder(self._shelf, self._retiring, self._codecs)
        self._composing = PatchComposer(self._shelf, self._retiring, self._codecs)

    @property
    def index(self) -> VersionIndex:
        return self._shelf.index

    @property
    def needed(self) -> Callable[[], set[Node]]:
        """What live holders have or fetch."""
        return self._shelf.needed

    @needed.setter
    def needed(self, needed: Callable[[], set[Node]]) -> None:
        self._shelf.needed = needed

    @property
    def lasting(self) -> Callable[[Stream, int], int]:
        """How many holders that last have all of a version."""
        return self._shelf.lasting

    @lasting.setter
    def lasting(self, lasting: Callable[[Stream, int], int]) -> None:
        self._shelf.lasting = lasting

    async def open(self) -> None:
        """Find what lies in the directory. Looks at sizes alone; digests are checked at reads.

        Raises `InvalidRequest` for what can be neither read nor deleted.
        """
        await self._keys.open()
        await self._shelf.open()
        self._retiring.spare_found()
        async with self._shelf.lock:
            await self._retiring.tidy()
        self._anchors.consider()

    async def close(self) -> None:
        """Let changes under way finish, then give up the directory."""
        await self._anchors.close()
        await self._composing.close()
        await self._shelf.close()
        await asyncio.to_thread(self._codecs.close)

    # -- publish -------------------------------------------------------------------------------------------------

    async def begin(self, manifest: Manifest, patch: Patch | None = None, *, arriving: bool = False) -> list[bytes]:
        """Stage a version and say which of its blobs to put, in order; none if it is committed already.

        With a patch these are the patch's, else all dense tiles. `arriving`: it comes from upstream and may be read
        at once; its patch need not be signed, and the patch's base may be arriving too.
        Raises `InvalidRequest` and `ChunkCorrupt` as `check_manifest` and `check_patch`, `PermissionDenied` if the
        run's publisher has not signed, `LeaseSuperseded` if the run has ended, `AlreadyExists` if the number has
        another root, `NotReady` if the patch's base is not here, `NoCapacity` if it does not fit beside what must stay.
        """
        return await self._publishing.begin(manifest, patch, arriving=arriving)

    async def put(self, digest: bytes, data: bytes, *, verified: bool = False) -> None:
        """Verify and store a blob that a stage wants; `verified`: it has matched its digest already.

        Raises `InvalidRequest` if none does, or if it is of no such size, or no such tile patch, as any of them says;
        `ChunkCorrupt` if it is damaged.
        """
        await self._publishing.put(digest, data, verified=verified)

    async def sync(self) -> None:
        """Make the blobs put so far durable, so that the commit, which has a deadline, need not."""
        await self._shelf.sync()

    def missing(self, run_id: str, version: PolicyVersion) -> bytes | None:
        """Which blobs a staged version lacks."""
        return self._publishing.missing(run_id, version)

    async def commit(self, run_id: str, version: PolicyVersion) -> VersionInfo:
        """Make a staged version visible. Idempotent. Raises `NotReady` while blobs or the patch's base are missing, and
        `InvalidRequest` if a blob that came for another version is not what this one says."""
        info = await self._publishing.commit(run_id, version)
        self._anchors.consider()
        return info

    async def abandon(self, run_id: str, policy: str, version: int) -> None:
        """Give an arriving version up. Those who wait for its blobs are told `VersionUnavailable`."""
        await self._publishing.abandon(run_id, policy, version)

    # -- read ----------------------------------------------------------------------------------------------------

    def manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """The manifest of a version that is committed or arriving, of the newest for 0. Raises `VersionUnavailable`."""
        return self._reading.manifest(run_id, policy, version)

    def patch(self, run_id: str, policy: str, base: int, version: int) -> Patch:
        """The patch between two versions. Raises `VersionUnavailable` if there is none."""
        return self._reading.patch(run_id, policy, base, version)

    async def tile(self, digest: bytes) -> bytes:
        """A blob, verified; waited for if an arriving version takes it. Raises `VersionUnavailable` if none has it.

        Raises `ChunkCorrupt` if the disk does not hold it as it was; what stands on it is let go then.
        """
        return await self._reading.tile(digest)

    def watch(self, run_id: str = "", policy: str = "") -> AsyncIterator[VersionInfo]:
        """The versions held, of all runs and policies where none is named, then each new one."""
        return self._reading.watch(run_id, policy)

    async def ways(
        self,
        run_id: str,
        policy: str,
        version: int,
        have: Iterable[int],
        *,
        scratch: bool = False,
        bytes_per_s: float = 0.0,
    ) -> list[FoundWay]:
        """Ways to a version (0: the newest) from those in `have`, cheapest first; from anchors too with `scratch`.

        Composes the patches of the cheapest if one who fetches at `bytes_per_s` (0: unknown) gains by it.
        Raises `VersionUnavailable` if the version is not here.
        """
        stream = run_id, policy
        number = self.manifest(run_id, policy, version).version.version
        held = list(have)
        found = find_ways(*self.index.graph(stream), number, held, scratch=scratch)
        if found and len(found[0].via) > 1:
            await self._composing.improve(stream, found[0], bytes_per_s)
            found = find_ways(*self.index.graph(stream), number, held, scratch=scratch)
        if not found:
            raise VersionUnavailable(f"no way leads to version {number} of {policy} any more; ask for a newer one")
        return found

    # -- ended runs ----------------------------------------------------------------------------------------------

    def held(self) -> set[str]:
        """The runs of which anything is kept."""
        return self.index.runs() | self._keys.runs

    async def forget(self, run_id: str) -> None:
        """Let go of all that is kept of a run that has ended."""
        await self._shelf.finish(self._forget(run_id))

    async def _forget(self, run_id: str) -> None:
        await self._retiring.forget_run(run_id)
        await self._keys.unpin(run_id)
        self._shelf.announce()

    async def tidy(self) -> None:
        """Delete blobs that came as what wanted them went."""
        async with self._shelf.lock:
            await self._shelf.drop_garbage()

    # -- let go --------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """For ever: forget stages of publishers that went silent, and what retention by age lets go.

        Versions and stages that a failing disk did not let go are tried again the next time.
        """
        while True:
            await asyncio.sleep(self.settings.stage_ttl_s / 4)
            try:
                await self._shelf.finish(self._retiring.drop_dead_stages())
            except (EbbtideError, OSError) as error:
                log.warning("sweep failed", error=str(error))
            self._anchors.consider()
