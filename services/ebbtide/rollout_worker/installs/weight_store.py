"""Holds policy versions for this worker: pulls them into the host's mirror, locks them for installs, serves them.

Invariant: an engine reads the mirror only under its lock, and the digests of all tiles that the engine needs are
checked under that same lock. So the engine reads one version, although other workers of the host move the mirror to
other versions in between. The relay learns of the version that the engine serves, with an address only while the mirror
holds all of it: so no peer asks here for missing tiles. A relay that does not answer is told again later. When the
process dies, the host's mirror keeps what was verified, and the relay forgets a silent holder.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.engine.checkpoint_facts import architecture, misfits
from ebbtide.rollout_worker.installs.host_mirrors import HostMirrors, host_name, unbroken
from ebbtide.rollout_worker.installs.peers import PeerBlobs, PeerListener
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.transfer import BlobCache, ElementChanges, Mirror, Pulled, Puller, opener
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.weights import Holder, Manifest, PolicyVersion
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import Place, check_signature, places_of, same_geometry

log = telemetry.get_logger(__name__)

_MIB: Final = 1 << 20
#: Pulls of one install. After each, the mirror must hold the version under the lock that the install takes.
_PULLS: Final = 3
#: The host's other workers wait no longer than this for an engine that installs.
_INSTALL_S: Final = 600.0
#: Interval of reports to a relay that does not answer or names none.
_AGAIN_S: Final = 5.0
#: Shortest interval of reports, whatever the relay asks for.
_LEAST_S: Final = 0.5


class TargetVersion(NamedTuple):
    """A version of one run's policy."""

    run_id: str
    version: PolicyVersion
    #: Public key (32 bytes) that must have signed the version; empty: any key, or none.
    publisher: bytes = b""

    @property
    def names(self) -> dict[str, str | int]:
        """Fields of log lines."""
        return {"run_id": self.run_id, "policy": self.version.policy, "version": self.version.version}


class OtherArchitecture(InvalidRequest):
    """The version's tensors are not those of the engine's model."""

    def __init__(self, message: str, manifest: Manifest) -> None:
        super().__init__(message, field="weights")
        #: Of the version's tensors.
        self.architecture = architecture(_shapes(manifest))


class EngineNeeds:
    """Tells which tiles of a version one engine reads. Answers change when it restarts for another model."""

    def __init__(self, engine: Engine, *, in_place: bool) -> None:
        """`in_place`: the engine applies changes between versions."""
        self._engine, self._in_place = engine, in_place

    def misfits(self, manifest: Manifest) -> str:
        """Tensors that keep the version out of the engine; empty: none. An engine without shapes takes any tensors."""
        return misfits(_shapes(manifest), self._engine.shapes) if self._engine.shapes else ""

    def places(self, manifest: Manifest) -> list[Place] | None:
        """The tiles that the engine reads; None: all."""
        if (boxes := self._engine.boxes) is None or self.misfits(manifest):
            return None
        found = places_of(manifest, boxes)
        return None if len(found) == sum(len(entry.digests) for entry in manifest.tensors) else found

    def takes_changes(self, manifest: Manifest) -> bool:
        """Whether the engine can install a version from its changes. An engine that reads slices cannot: the changes
        kept in a mirror may be those of another engine's slices."""
        return self._in_place and self.places(manifest) is None

    def met_by(self, mirror: Mirror, manifest: Manifest) -> bool:
        """Whether the mirror holds the version's digest for each tile that the engine reads."""
        needed = self.places(manifest)
        if needed is None or not same_geometry(mirror.manifest, manifest):
            return mirror.holds(manifest)
        held = mirror.held()
        return all(held.get(place) == manifest.tensors[place[0]].digests[place[1]] for place in needed)


class WeightStore:
    """Owns this worker's weights outside the engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        engine: Engine,
        stub: WeightsStub,
        *,
        in_place: bool,
        threads: DigestThreads,
    ) -> None:
        """`stub`: of the relay that `settings` name. `in_place`: the engine applies changes between versions.
        `threads`: for digests and patches."""
        self._settings, self._worker_id = settings, worker_id
        folder = Path(settings.mirror_dir) if settings.mirror_dir else None
        self._host = host_name(folder) if folder else ""
        self._news = asyncio.Event()  # set when the relay needs a report at once
        self._served: Manifest | None = None  # what the engine serves
        self._install_s = 0.0  # for which its install held generation
        self._refused: PolicyVersion | None = None  # the engine's last refusal
        self._in_doubt = False  # the mirror's digests must be computed again before the next use
        self._needs = EngineNeeds(engine, in_place=in_place)
        self._mirrors = HostMirrors(folder, settings.pull_patience_s)
        cache = BlobCache(settings.peer_cache_mib * _MIB)
        self._peers = PeerBlobs(cache, lambda: self._mirrors.current, settings.peer_readers)
        self.listener = PeerListener(settings, self._peers, self._news.set)
        self._puller = Puller(
            stub,
            settings.relay,
            holder=self._holder,
            patience_s=settings.pull_patience_s,
            open_source=opener(settings.client),
            cache=cache if settings.peer_listen else None,
            threads=threads,
        )

    def fits(self, manifest: Manifest) -> bool:
        """Whether the engine can take the version without a restart."""
        return not self._needs.misfits(manifest)

    async def begin(self, wanted: TargetVersion, change: Callable[[Manifest], str] | None = None) -> Manifest:
        """Get and check a version's manifest. `change` says why the engine may not restart for a version that does not
        fit it; empty if it may.

        Raises `OtherArchitecture` for weights that do not fit the engine, `InvalidRequest` for a manifest that is not
        the announced one, `PermissionDenied` for one that its publisher did not sign, `VersionUnavailable` if the relay
        has none of it, and `ChunkCorrupt` or `Unavailable` if no source was good until patience ended.
        """
        version = wanted.version
        ref = wanted.run_id, version.policy, version.version
        manifest = await self._puller.manifest(*ref, publisher=wanted.publisher, root=version.root)
        if manifest.version != version or manifest.run_id != wanted.run_id:
            raise InvalidRequest("the relay's manifest is not that of the version announced", field="version.root")
        if not wanted.publisher and (manifest.publisher or manifest.signature):
            check_signature(manifest)
        if names := self._needs.misfits(manifest):
            refusal = change(manifest) if change else "of another architecture than this engine's model"
            if refusal:
                raise OtherArchitecture(f"{refusal}: see {names}", manifest)
        await self._mirrors.come_back()
        return manifest

    @asynccontextmanager
    async def locked(self, wanted: TargetVersion, manifest: Manifest) -> AsyncIterator[tuple[Path, Path | None]]:
        """The file to install a version from, and the changes in it since the served one, if these are known. No
        process changes either meanwhile. Pulls what the mirror lacks first.

        A pull locks the mirror alone; an install shares the lock, so that the engines of a host install side by side.
        Between the two locks, another worker may move the mirror on, so the digests are checked again under the second.
        Raises `VersionUnavailable`, `ChunkCorrupt`, `Unavailable` or `NoCapacity` as a pull does; `ChunkCorrupt` too
        if the mirror lacks the version after `_PULLS` pulls.
        """
        pulls = 0
        while True:
            if not self._in_doubt:
                async with self._mirrors.locked(manifest, shared=True) as mirror:
                    if self._needs.met_by(mirror, manifest):
                        async with self._mirrors.at_work(mirror, _INSTALL_S):
                            yield mirror.path, self._changes(mirror, manifest)
                        return
            if pulls == _PULLS:
                raise ChunkCorrupt(f"the mirror lacks tiles of the version after each of {_PULLS} pulls")
            pulls += await self._fill(wanted, manifest)

    async def _fill(self, wanted: TargetVersion, manifest: Manifest) -> bool:
        """Bring the mirror to a version. Returns whether that took a pull: another worker may have filled it."""
        async with self._mirrors.locked(manifest) as mirror:
            if self._in_doubt:
                mirror.doubt()
                self._in_doubt = False
            if self._needs.met_by(mirror, manifest):
                return False
            async with self._mirrors.at_work(mirror):
                await self._pull(wanted, manifest, mirror)
            return True

    async def _pull(self, wanted: TargetVersion, manifest: Manifest, mirror: Mirror) -> None:
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
        """The changes since the served version, pulled by any worker of the host."""
        if self._served is None or not self._needs.takes_changes(manifest):
            return None
        return mirror.changes(self._served.version.root, manifest.version.root)

    def serves(self, manifest: Manifest | None) -> None:
        """The engine serves this version from now on; None: no version."""
        self._served = manifest

    def refused(self, version: PolicyVersion) -> None:
        """The engine refused a version's file: the next try hashes the mirror again, once for each version."""
        self._in_doubt = self._in_doubt or version != self._refused
        self._refused = version

    def forget(self, run_id: str) -> None:
        """A run is over: free the memory of its versions, and serve nothing of it."""
        if self._served is not None and self._served.run_id == run_id:
            self._served = None
        self._mirrors.forget(run_id)
        self._puller.forget()
        self._news.set()

    def announce(self, install_s: float) -> None:
        """Report the served version to the relay at once; its install held generation for `install_s`."""
        self._install_s = install_s
        self._news.set()

    async def tell_relay(self) -> None:
        """Report what this worker holds to the relay, forever: otherwise it is known as a holder only during pulls."""
        while True:
            await self._news.wait()
            self._news.clear()
            again_s = await self._tell(self._served) if self._served else _AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(max(again_s, _LEAST_S)):
                    await self._news.wait()
            self._news.set()

    async def _tell(self, manifest: Manifest) -> float:
        """Returns seconds until the next report is due."""
        version, mirror = manifest.version, self._mirrors.current
        kept = mirror is not None and mirror.holds(manifest)
        try:
            told = self._puller.tell(manifest.run_id, version, kept=kept, install_s=self._install_s)
            return await told or _AGAIN_S
        except EbbtideError as error:
            log.debug("the relay was not told", version=version.version, reason=str(error))
            return _AGAIN_S

    def _holder(self) -> Holder:
        """This worker, as relays know it."""
        return Holder(
            name=self._worker_id,
            site=self._settings.site,
            # A worker without shared memory names a host of its own: others would wait for its pulls otherwise.
            host=self._host if self._mirrors.shared else f"worker:{self._worker_id}",
            address=self.listener.address,
            lasting=self._settings.kind is WorkerKind.RESERVED,
            readers=self._peers.streams.total(),
        )

    def warm_up(self) -> None:
        """Prepare for patches in the background."""
        self._puller.warm_up()

    def close(self) -> None:
        """Give the mirror up. The host's mirror goes when no other worker uses it."""
        self._mirrors.close()
        self._puller.close()


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.full_shape for entry in manifest.tensors}


def _count(pulled: Pulled) -> None:
    for name, size in pulled.bytes_by_source.items():
        metrics.PULLED_BYTES.labels("relay" if name == "weight-relay" else "peer").inc(size)
    metrics.TILES.labels("fetched").inc(pulled.tiles)
    metrics.TILES.labels("reused").inc(max(0, pulled.reused))
    metrics.PHASE_SECONDS.labels("pull").inc(pulled.seconds)
    metrics.PHASE_SECONDS.labels("verify").inc(pulled.digests_s)
