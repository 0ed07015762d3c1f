"""One tile after another of a patch that does what a chain of patches does."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Manifest, Patch, TensorPatch
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.intake.tile_rebuild import Read, patched, rebuild
from ebbtide.weights import Place, Planner, TileTask, Way, places, seal_patch, tile_digest
from ebbtide.weights.patch.tile_format import SPARSE_HEAD, Kind, read_tile, unit_width


class ComposedTile(Struct, frozen=True):
    """A composed tile: a blob, and of how many units at most it changes the tile."""

    place: Place
    digest: bytes
    data: bytes
    changed: int


class TileComposer:
    """The tiles of one composed patch. `make` runs in threads."""

    def __init__(
        self,
        base: Manifest,
        target: Manifest,
        patches: Sequence[Patch],
        from_anchor: Way | None,
        codecs: TileCodecs,
        read: Read,
    ) -> None:
        """`from_anchor`: a way from an anchor to the target, if there is one."""
        self._base, self._target, self._patches, self._from_anchor = base, target, patches, from_anchor
        self._codecs, self._read = codecs, read

    def tasks(self) -> Iterator[TileTask]:
        """One for each tile in which the versions differ."""
        held = {place: self._base.tensors[place[0]].digests[place[1]] for place in places(self._base)}
        way = Way(start=self._base, patches=tuple(self._patches), anchor=False)
        for task in Planner(self._target, [way]).tasks(places(self._target), held):
            if isinstance(task, TileTask):
                yield task

    def make(self, task: TileTask) -> ComposedTile:
        """Raises `InvalidRequest` for what cannot be composed, or is not what the manifest says."""
        width = unit_width(self._target.tensors[task.place[0]].dtype)
        units = task.length // width
        patches = [self._read(digest) for digest in task.patches]
        if task.dense:
            return self._dense(task, patched(self._read(task.dense), patches, width, self._codecs))
        data = patches[0] if len(patches) == 1 else self._codecs.of(width).compose(patches, units)
        if len(data) >= task.length:
            return self._as_dense(task, data, width)
        kind = read_tile(data, width, units).kind
        if kind == Kind.SAME:
            raise InvalidRequest("changes nothing where its versions differ", field="patch")
        return ComposedTile(task.place, tile_digest(data), data, _changed(data, width, units))

    def _as_dense(self, task: TileTask, data: bytes, width: int) -> ComposedTile:
        """A tile patch not smaller than its tile becomes the tile, which an anchor leads to if the patch does not."""
        if read_tile(data, width, task.length // width).kind in {Kind.DENSE, Kind.PACKED}:
            return self._dense(task, patched(bytes(task.length), [data], width, self._codecs))
        if self._from_anchor is not None:
            for whole in Planner(self._target, [self._from_anchor]).tasks([task.place], {}):
                if isinstance(whole, TileTask):
                    return self._dense(task, rebuild(whole, width, self._codecs, self._read))
        raise InvalidRequest("is larger composed than its dense tile, which is not here", field="patch")

    def _dense(self, task: TileTask, data: bytes) -> ComposedTile:
        if tile_digest(data) != task.digest:
            raise InvalidRequest("makes another tile than its manifest says", field="patch")
        width = unit_width(self._target.tensors[task.place[0]].dtype)
        return ComposedTile(task.place, task.digest, data, task.length // width)


class ComposeOutcome:
    """The patch that composed tiles make up."""

    def __init__(self, target: Manifest) -> None:
        self._target = target
        self._tiles: dict[Place, tuple[int, bytes]] = {}
        self._changed = 0

    def add(self, tile: ComposedTile) -> None:
        self._tiles[tile.place] = len(tile.data), tile.digest
        self._changed += tile.changed

    def patch(self, base: Manifest) -> Patch:
        tensors = []
        for tensor, entry in enumerate(self._target.tensors):
            tiles = [self._tiles.get((tensor, tile), (0, b"")) for tile in range(len(entry.digests))]
            digests = tuple(digest for size, digest in tiles if size)
            tensors.append(TensorPatch(sizes=tuple(size for size, _ in tiles), digests=digests))
        elements = sum(entry.size // unit_width(entry.dtype) for entry in self._target.tensors)
        return seal_patch(
            Patch(
                run_id=base.run_id,
                base=base.version,
                version=self._target.version,
                tensors=tuple(tensors),
                changed=min(self._changed, elements),
                elements=elements,
            )
        )


def _changed(data: bytes, width: int, units: int) -> int:
    """Units that a tile patch changes: as it says itself where it is sparse, else all of them."""
    tile = read_tile(data, width, units)
    return int(SPARSE_HEAD.unpack_from(tile.payload)[0]) if tile.kind == Kind.SPARSE else units
