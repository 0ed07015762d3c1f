"""Rebuilds dense tiles from older ones and tile patches, and checks each against its manifest."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay.intake.tile_codecs import TileCodecs
from ebbtide.weight_relay.library.version_records import Ends
from ebbtide.weights import Place, Planner, TileTask, Way, tile_digest
from ebbtide.weights.patch.tile_format import unit_width

#: Reads a blob, verified. Raises `ChunkCorrupt` and `FileNotFoundError`.
Read: TypeAlias = Callable[[bytes], bytes]


def patched(dense: bytes, patches: Sequence[bytes], width: int, codecs: TileCodecs) -> bytes:
    """Apply tile patches to `dense`. Raises `InvalidRequest` for one that does not fit."""
    if not patches:
        return dense
    tile = np.frombuffer(bytearray(dense), np.dtype(f"<u{width}"))
    for patch in patches:
        codecs.of(width).apply(patch, tile)
    return tile.tobytes()


def rebuild(task: TileTask, width: int, codecs: TileCodecs, read: Read) -> bytes:
    """Make the dense tile of `task`, which starts at a dense one.

    Raises `InvalidRequest` for a patch that does not fit, and if another tile comes out.
    """
    data = patched(read(task.dense), [read(digest) for digest in task.patches], width, codecs)
    if tile_digest(data) != task.digest:
        raise InvalidRequest("makes another tile than its manifest says", field="patch")
    return data


def first_wrong(
    place: Place, start: Manifest, way: Sequence[tuple[Manifest, Patch]], codecs: TileCodecs, read: Read
) -> Ends | None:
    """Find the first patch on `way` (versions and the patches to them) that does not make its version's tile.

    Returns its base and version; None if all patches are right. Raises as `read`.
    """
    width = unit_width(start.tensors[place[0]].dtype)
    for length in range(1, len(way) + 1):
        target = way[length - 1][0]
        steps = Way(start=start, patches=tuple(patch for _, patch in way[:length]), anchor=True)
        (task,) = Planner(target, [steps]).tasks([place], {})
        try:
            if isinstance(task, TileTask):
                rebuild(task, width, codecs, read)
        except InvalidRequest:
            patch = way[length - 1][1]
            return patch.base.version, patch.version.version
    return None
