"""Holds policy versions for this worker: pulls them into the host's mirror, locks them for installs, serves them.

Invariant: an engine reads the mirror only under its lock, and the digests of all tiles that the engine needs are
checked under that same lock. So the engine reads one version, although other workers of the host bring the mirror to
others in between. The relay is told of the version that the engine serves, with an address only while the mirror holds
all of it: so no peer is sent here for what is gone. A relay that does not answer is told again later. When the process
dies, the host's mirror keeps what was verified, and the relay forgets a holder that is silent.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.installs.engine_needs import EngineNeeds
from ebbtide.rollout_worker.installs.host_mirrors import HostMirrors, unbroken
from ebbtide.rollout_worker.installs.peer_blobs import PeerBlobs, serving
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rollout_worker.shared_host import host_name
from ebbtide.transfer import BlobCache, ElementChanges, Mirror, Pulled, Puller, opener
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.weights import Holder, Manifest, PolicyVersion
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import check_signature

log = telemetry.get_logger(__name__)

_MIB: Final = 1 << 20
#: The host's other workers do not wait longer for an engine that installs.
_INSTALL_S: Final = 600.0
#: Time until the relay is told again, if it did not answer or named no time.
_AGAIN_S: Final = 5.0
#: Shortest time between two reports to the relay, whatever the relay asks for.
_LEAST_S: Final = 0.5
#: Threads beside a served engine get what it leaves of the cores.
_NICENESS: Final = 19
_OTHER: Final = "of another architecture than this engine's model"


class Installation(NamedTuple):
    """A version of one run's policy."""

    run_id: str
    version: PolicyVersion
    #: Public key (32 bytes) that must have signed the version; empty: any key, or none.
    publisher: bytes = b""


class WeightStore:
    """The one owner of this worker's weights outside the engine."""

    def __init__(self, settings: WorkerSettings, worker_id: str, engine: Engine, stub: WeightsStub) -> None:
        """`stub`: of the relay that `settings` name."""
        self._settings, self._worker_id = settings, worker_id
        folder = Path(settings.mirror_dir) if settings.mirror_dir else None
        self._host = host_name(folder) if folder else ""
        cache = BlobCache(settings.peer_cache_mib * _MIB)
        self._needs = EngineNeeds(engine, in_place=_in_place(settings))
        self._mirrors = HostMirrors(folder, settings.pull_patience_s)
        self._shelf = PeerBlobs(cache, lambda: self._mirrors.current, settings.peer_readers)
        self._puller = Puller(
            stub,
            settings.relay,
            holder=self._holder,
            patience_s=settings.pull_patience_s,
            open_source=opener(settings.client),
            cache=cache if settings.peer_listen else None,
            threads=threads_for(settings),
        )
        self._served: Manifest | None = None  # what the engine serves
        self._install_s = 0.0  # for which the install of it held generation
        self._refused: PolicyVersion | None = None  # the last one that the engine refused
        self._in_doubt = False  # the mirror's digests are computed again before the next use
        self._news = asyncio.Event()  # set when the relay is to be told at once

    # -- towards an install --------------------------------------------------------------------------------------

    def fits(self, manifest: Manifest) -> bool:
        """Whether the engine can take the version as it is."""
        return self._needs.fits(manifest)

    async def begin(self, wanted: Installation, change: Callable[[Manifest], str] | None = None) -> Manifest:
        """Get and check a version's manifest, and choose the mirror for it. `change`: says why the engine may not start
        anew for a version that does not fit it; empty if it may.

        Raises `OtherArchitecture` for weights that do not fit the engine, `InvalidRequest` for a manifest that is not
        the announced one, `PermissionDenied` for one that its publisher did not sign, `VersionUnavailable` if the relay
        has none of it, `ChunkCorrupt` or `Unavailable` if that is how it still was when patience ended.
        """
        version = wanted.version
        ref = wanted.run_id, version.policy, version.version
        manifest = await self._puller.manifest(*ref, publisher=wanted.publisher, root=version.root)
        if manifest.version != version or manifest.run_id != wanted.run_id:
            raise InvalidRequest("the relay's manifest is not that of the version announced", field="version.root")
        if not wanted.publisher and (manifest.publisher or manifest.signature):
            check_signature(manifest)
        if not self.fits(manifest) and (refusal := change(manifest) if change else _OTHER):
            self._needs.check(manifest, refusal)
        await self._mirrors.come_back()
        return manifest

    @asynccontextmanager
    async def locked(self, wanted: Installation, manifest: Manifest) -> AsyncIterator[tuple[Path, Path | None]]:
        """The file to install a version from, and the changes in it since the served one, if these are known. No
        process changes either meanwhile. Pulls what the mirror lacks first.

        A pull needs the lock alone; an install shares it, so that the engines of a host install side by side. Another
        worker may move the mirror on between the two: so the digests are checked under the lock that the install has.
        Raises `VersionUnavailable`, `ChunkCorrupt`, `Unavailable` or `NoCapacity` as a pull does.
        """
        while True:
            if not self._in_doubt:
                async with self._mirrors.locked(manifest, shared=True) as mirror:
                    if self._needs.met_by(mirror, manifest):
                        async with self._mirrors.at_work(mirror, _INSTALL_S):
                            yield mirror.path, self._changes(mirror, manifest)
                        return
            await self._fill(wanted, manifest)

    async def _fill(self, wanted: Installation, manifest: Manifest) -> None:
        """Bring the mirror to a version, unless another worker has done so meanwhile."""
        async with self._mirrors.locked(manifest) as mirror:
            if self._in_doubt:
                mirror.doubt()
                self._in_doubt = False
            if not self._needs.met_by(mirror, manifest):
                async with self._mirrors.at_work(mirror):
                    await self._pull(wanted, manifest, mirror)

    async def _pull(self, wanted: Installation, manifest: Manifest, mirror: Mirror) -> None:
        """Pull what a locked mirror lacks of a version."""
        base = self._served
        follows = base is not None and self._needs.takes_changes(manifest) and mirror.holds(base)
        changes = ElementChanges(manifest) if follows else None
        pulled = await self._puller.pull(
            wanted.run_id,
            wanted.version,
            mirror,
            manifest,
            publisher=wanted.publisher,
            wanted=self._needs.places(manifest),
            changes=changes,
        )
        _count(pulled)
        if base is not None and changes is not None:
            await unbroken(asyncio.to_thread(mirror.keep_changes, base.version.root, manifest.version.root, changes))

    def _changes(self, mirror: Mirror, manifest: Manifest) -> Path | None:
        """The changes from what the engine serves, pulled by any worker of the host."""
        if self._served is None or not self._needs.takes_changes(manifest):
            return None
        return mirror.changes(self._served.version.root, manifest.version.root)

    # -- what the installer tells --------------------------------------------------------------------------------

    def serves(self, manifest: Manifest | None) -> None:
        """The engine serves this version from now on; None: no version."""
        self._served = manifest

    def refused(self, version: PolicyVersion) -> None:
        """The engine refused a version's file. The whole mirror is hashed again before the next try, once for each
        version, as the fault may be the engine's or the version's."""
        self._in_doubt = self._in_doubt or version != self._refused
        self._refused = version

    def forget(self, run_id: str) -> None:
        """A run is over: give back the memory that its versions take, and serve nothing of it."""
        if self._served is not None and self._served.run_id == run_id:
            self._served = None
        self._mirrors.forget(run_id)
        self._puller.forget()
        self._news.set()

    # -- towards the relay and peers -----------------------------------------------------------------------------

    def announce(self, install_s: float) -> None:
        """Tell the relay at once of what the engine serves; its install held generation for `install_s`."""
        self._install_s = install_s
        self._news.set()

    async def tell_relay(self) -> None:
        """Keep telling the relay what this worker holds, for ever. Without this it is known as a holder only while it
        pulls."""
        while True:
            await self._news.wait()
            self._news.clear()
            again_s = await self._tell(self._served) if self._served else _AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(again_s, _LEAST_S)):
                    await self._news.wait()
            self._news.set()

    async def _tell(self, manifest: Manifest) -> float:
        """Returns seconds until the relay is to be told again."""
        version, mirror = manifest.version, self._mirrors.current
        kept = mirror is not None and mirror.holds(manifest)
        try:
            told = self._puller.tell(manifest.run_id, version, kept=kept, install_s=self._install_s)
            return await told or _AGAIN_S
        except EbbtideError as error:
            log.debug("the relay was not told", version=version.version, reason=str(error))
            return _AGAIN_S

    @asynccontextmanager
    async def serving(self, leaving: asyncio.Event) -> AsyncGenerator[None, None]:
        """Serve peers until `leaving` is set, if the settings say so; see `peers.serving`."""
        async with serving(self._settings, self._shelf, leaving, self._news.set):
            yield

    def _holder(self) -> Holder:
        """This worker, as relays are told of it."""
        return Holder(
            name=self._worker_id,
            site=self._settings.site,
            # A worker that shares no memory must not be taken for one that does: others would wait for its pulls.
            host=self._host if self._mirrors.shared else f"worker:{self._worker_id}",
            address=self._shelf.address,
            lasting=self._settings.kind is WorkerKind.RESERVED,
            readers=self._shelf.streams.total(),
        )

    # -- its life ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Make ready for patches in the background."""
        self._puller.warm_up()

    def close(self) -> None:
        """Give the mirror up. The host's goes when no other worker uses it."""
        self._mirrors.close()
        self._puller.close()


def threads_for(settings: WorkerSettings) -> DigestThreads:
    """For digests and patches. A borrowed worker's have the lowest priority, as a pull waits for no grant; there is one
    at most where the served engine computes on the same cores."""
    if settings.kind is not WorkerKind.BORROWED:
        return DigestThreads()
    on_cores = settings.engine == "vllm" and is_cpu_build()
    return DigestThreads(1, niceness=_NICENESS) if on_cores else DigestThreads(niceness=_NICENESS)


def _in_place(settings: WorkerSettings) -> bool:
    """Whether the engine applies changes to weights where they are. CPU builds load packed copies of them."""
    return settings.engine == "vllm" and not is_cpu_build()


def _count(pulled: Pulled) -> None:
    for name, size in pulled.bytes_by_source.items():
        metrics.PULLED_BYTES.labels("relay" if name == "weight-relay" else "peer").inc(size)
    metrics.TILES.labels("fetched").inc(pulled.tiles)
    metrics.TILES.labels("reused").inc(max(0, pulled.reused))
    metrics.PHASE_SECONDS.labels("pull").inc(pulled.seconds)
    metrics.PHASE_SECONDS.labels("verify").inc(pulled.digests_s)
