"""Dense tiles out of older ones and tile patches, each checked against the manifest before it is given."""

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
    """`dense` after tile patches. Raises `InvalidRequest` for one that does not fit."""
    if not patches:
        return dense
    tile = np.frombuffer(bytearray(dense), np.dtype(f"<u{width}"))
    for patch in patches:
        codecs.of(width).apply(patch, tile)
    return tile.tobytes()


def rebuild(task: TileTask, width: int, codecs: TileCodecs, read: Read) -> bytes:
    """The dense tile that `task`, which starts at one, is to make.

    Raises `InvalidRequest` for a patch that does not fit, and if something else comes out.
    """
    data = patched(read(task.dense), [read(digest) for digest in task.patches], width, codecs)
    if tile_digest(data) != task.digest:
        raise InvalidRequest("makes another tile than its manifest says", field="patch")
    return data


def first_wrong(
    place: Place, start: Manifest, way: Sequence[tuple[Manifest, Patch]], codecs: TileCodecs, read: Read
) -> Ends | None:
    """Base and version of the first patch on `way` that does not make its version's tile out of its base's.

    `way`: versions with the patches to them. None if all of them do.

    Raises `ChunkCorrupt` and `FileNotFoundError` if blobs are damaged or gone.
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
