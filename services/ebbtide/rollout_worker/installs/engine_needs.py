"""Tells which tiles of a version the engine reads, and whether the version fits its model at all."""

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.engine.checkpoint_facts import architecture, misfits
from ebbtide.transfer import Mirror
from ebbtide.types.weights import Manifest
from ebbtide.weights import Place, places_of, same_geometry


class OtherArchitecture(InvalidRequest):
    """The version's tensors are not those of the engine's model."""

    def __init__(self, message: str, manifest: Manifest) -> None:
        super().__init__(message, field="weights")
        #: Of the version's tensors.
        self.architecture = architecture(_shapes(manifest))


class EngineNeeds:
    """What one engine needs of a version. The answers change when the engine starts anew for another model."""

    def __init__(self, engine: Engine, *, in_place: bool) -> None:
        """`in_place`: the engine makes use of what changes between versions."""
        self._engine, self._in_place = engine, in_place

    def fits(self, manifest: Manifest) -> bool:
        """Whether the engine can take the version as it is. An engine that names no shapes takes any."""
        return not self._engine.shapes or not misfits(_shapes(manifest), self._engine.shapes)

    def check(self, manifest: Manifest, refusal: str) -> None:
        """Raise `OtherArchitecture` with `refusal` unless the version fits."""
        if not self.fits(manifest):
            names = misfits(_shapes(manifest), self._engine.shapes)
            raise OtherArchitecture(f"{refusal}: see {names}", manifest)

    def places(self, manifest: Manifest) -> list[Place] | None:
        """The tiles that the engine reads; None: all."""
        if (boxes := self._engine.boxes) is None or not self.fits(manifest):
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


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.full_shape for entry in manifest.tensors}
