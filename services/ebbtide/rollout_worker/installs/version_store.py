"""Policy versions in the mirror of this worker's host, pulled from the relay and from peers, verified tile by tile.

Invariant: an engine reads the mirror only under its lock, after a look at the digests of all tiles that it needs: so
what it reads is one version, whoever else brings the mirror to others in between. `installed` is the manifest of what
the engine serves, None before the first. When the process dies, the host's mirror keeps what it verified.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine, Shapes
from ebbtide.rollout_worker.engine.checkpoint_facts import architecture, misfits
from ebbtide.rollout_worker.installs.host_mirrors import HostMirrors, unbroken
from ebbtide.transfer import ElementChanges, Mirror, Pulled, Puller
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import Place, check_signature, places_of, same_geometry

#: An engine that takes longer to install is not waited for by the host's other workers.
_INSTALL_S: Final = 600.0
_OTHER: Final = "of another architecture than this engine's model"


class OtherArchitecture(InvalidRequest):
    """The version's tensors are not those of the engine's model; `architecture` is what they are."""

    def __init__(self, message: str, *, architecture: str) -> None:
        super().__init__(message, field="weights")
        self.architecture = architecture


class Installation(NamedTuple):
    """A version of one run's policy, signed by `publisher` (public key, 32 bytes; empty: by anybody, or nobody)."""

    run_id: str
    version: PolicyVersion
    publisher: bytes = b""


class VersionStore:
    """Brings versions to where the engine can read them."""

    def __init__(
        self, engine: Engine, puller: Puller, folder: Path | None, *, in_place: bool, patience_s: float
    ) -> None:
        """`folder`: of the host's mirrors; None for one of this worker's own. `in_place`: whether the engine makes use
        of what changes between versions. `patience_s`: see `HostMirrors`."""
        self._engine, self._puller, self._in_place = engine, puller, in_place
        self._mirrors = HostMirrors(folder, patience_s)
        self.installed: Manifest | None = None
        self._refused: PolicyVersion | None = None
        self._in_doubt = False

    @property
    def mirror(self) -> Mirror | None:
        """The one in use now."""
        return self._mirrors.current

    @property
    def shared(self) -> bool:
        """Whether the host's other workers find in the mirror what this one fetched."""
        return self._mirrors.shared

    def fits(self, manifest: Manifest) -> bool:
        """Whether the engine of the moment can take the version as it is."""
        return not self._engine.shapes or not misfits(_shapes(manifest), self._engine.shapes)

    async def prepare(self, wanted: Installation, change: Callable[[Manifest], str] | None = None) -> Manifest:
        """Bring the mirror to a version. Others may move it on as soon as this returns. `change`: the engine may be
        started anew for one that does not fit it, unless this says why not.

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
            check_fit(manifest, self._engine.shapes, refusal)
        await self._mirrors.come_back()
        async with self._filled(wanted, manifest):
            return manifest

    @asynccontextmanager
    async def ready(self, wanted: Installation, manifest: Manifest) -> AsyncIterator[tuple[Path, Path | None]]:
        """The file to install a prepared version from, and what changed in it since the installed one, if that is
        known. Nobody changes either meanwhile. Prepares it again if the mirror has moved on. Raises as `prepare`."""
        async with self._filled(wanted, manifest) as mirror, self._mirrors.at_work(mirror, _INSTALL_S):
            yield mirror.path, self._changes(mirror, manifest)

    @asynccontextmanager
    async def _filled(self, wanted: Installation, manifest: Manifest) -> AsyncIterator[Mirror]:
        """The mirror, locked, with all of a version that the engine needs."""
        if not self._in_doubt:
            async with self._mirrors.locked(manifest, shared=True) as mirror:
                if self._holds(mirror, manifest):
                    yield mirror
                    return
        async with self._mirrors.locked(manifest) as mirror:
            if self._in_doubt:
                mirror.doubt()
                self._in_doubt = False
            if not self._holds(mirror, manifest):  # as it is if another has filled it meanwhile
                async with self._mirrors.at_work(mirror):
                    await self._fill(wanted, manifest, mirror)
            yield mirror

    def refused(self, version: PolicyVersion) -> None:
        """The engine would not have a version's file: all of it is looked at again before the next try, but once for
        each version, as the fault may be the engine's or the version's."""
        self._in_doubt = self._in_doubt or version != self._refused
        self._refused = version

    def keeps(self, manifest: Manifest) -> bool:
        """Whether all of a version is in the mirror now, to be served on."""
        return self.mirror is not None and self.mirror.holds(manifest)

    def forget(self, run_id: str) -> None:
        """Give back the memory that a run's versions take here; it is over, and nobody reads them."""
        if self.installed is not None and self.installed.run_id == run_id:
            self.installed = None
        self._mirrors.forget(run_id)

    def close(self) -> None:
        """Give the mirror up. It goes when no other worker uses it."""
        self._mirrors.close()

    async def _fill(self, wanted: Installation, manifest: Manifest, mirror: Mirror) -> None:
        """Pull what the mirror lacks of a version; it is locked."""
        needed, base = self._places(manifest), self.installed
        follows = base is not None and self._takes_changes(manifest) and mirror.holds(base)
        changes = ElementChanges(manifest) if follows else None
        pulled = await self._puller.pull(
            wanted.run_id,
            wanted.version,
            mirror,
            manifest,
            publisher=wanted.publisher,
            wanted=needed,
            changes=changes,
        )
        _count(pulled)
        if base is not None and changes is not None:
            await unbroken(asyncio.to_thread(mirror.keep_changes, base.version.root, manifest.version.root, changes))

    def _takes_changes(self, manifest: Manifest) -> bool:
        """Only who needs all tiles: the changes kept in a mirror would be those of this or another engine's slices."""
        return self._in_place and self._places(manifest) is None

    def _changes(self, mirror: Mirror, manifest: Manifest) -> Path | None:
        """What changes from what the engine serves, whoever of the host's workers pulled it."""
        if self.installed is None or not self._takes_changes(manifest):
            return None
        return mirror.changes(self.installed.version.root, manifest.version.root)

    def _places(self, manifest: Manifest) -> list[Place] | None:
        """The tiles that the engine needs; None: all."""
        if (boxes := self._engine.boxes) is None or not self.fits(manifest):
            return None
        found = places_of(manifest, boxes)
        return None if len(found) == sum(len(entry.digests) for entry in manifest.tensors) else found

    def _holds(self, mirror: Mirror, manifest: Manifest) -> bool:
        needed = self._places(manifest)
        if needed is None or not same_geometry(mirror.manifest, manifest):
            return mirror.holds(manifest)
        held = mirror.held()
        return all(held.get(place) == manifest.tensors[place[0]].digests[place[1]] for place in needed)


def _count(pulled: Pulled) -> None:
    for name, size in pulled.bytes_by_source.items():
        metrics.PULLED_BYTES.labels("relay" if name == "weight-relay" else "peer").inc(size)
    metrics.TILES.labels("fetched").inc(pulled.tiles)
    metrics.TILES.labels("reused").inc(max(0, pulled.reused))
    metrics.PHASE_SECONDS.labels("pull").inc(pulled.seconds)
    metrics.PHASE_SECONDS.labels("verify").inc(pulled.digests_s)


def check_fit(manifest: Manifest, shapes: Shapes, refusal: str = _OTHER) -> None:
    """Raise `OtherArchitecture` unless the version has just the tensors `shapes` of the engine's model (empty: any)."""
    found = _shapes(manifest)
    if shapes and (names := misfits(found, shapes)):
        raise OtherArchitecture(f"{refusal}: see {names}", architecture=architecture(found))


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.full_shape for entry in manifest.tensors}
