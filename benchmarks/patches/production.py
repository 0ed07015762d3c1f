"""All that a publisher and a worker do with a tensor: encode it, digests included, and bring a mirror along.

A publisher's `Encoding` hashes each tile that changed, and its patch; a worker's `Mirror` patches a copy of the tile,
hashes it, and writes it.
"""

from ebbtide.transfer import Mirror
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import NamedTensor, TileTask, patched_tiles, seal_manifest, slice_tiles
from ebbtide.weights.patch import Array
from ebbtide.weights.version_encoding import Described, Encoded, Encoding, encode_version


class Production:
    """A tensor of bf16 in two versions, and a private mirror that is to get from the first to the second, in rounds:
    `begin`, `publish` by all threads, `fetch`, `pull` by all threads, `holds`."""

    def __init__(self, base: Array, new: Array) -> None:
        self._base, self._new = (
            NamedTensor(name="w", dtype="BF16", shape=(len(units),), data=units.view("u1").data)
            for units in (base, new)
        )
        known = encode_version([self._base]).result()
        self._described = Described((self._base,), known.entries)
        self._mirror = Mirror(_manifest(1, known), None)
        self._encoding = Encoding([])
        self._tasks: list[tuple[TileTask, dict[bytes, bytes]]] = []

    def begin(self) -> None:
        self._encoding = Encoding([self._new], self._described, keep_bytes=self._base.data.nbytes)

    def publish(self) -> None:
        self._encoding.work()

    def fetch(self) -> None:
        """Have the mirror be the base, and the tile patches be at hand."""
        found = self._encoding.result()
        before, after = self._described.entries[0].digests, found.entries[0].digests
        for tile, (digest, part) in enumerate(zip(before, slice_tiles(self._base), strict=True)):
            self._mirror.apply(_task(tile, digest, part, digest), {digest: bytes(part)})
        parts = list(slice_tiles(self._new))
        self._tasks = [
            (_task(tile, after[tile], parts[tile], blob), {blob: bytes(self._encoding.blob(blob))})
            for tile, _, blob in patched_tiles(found.patches[0])
        ]

    def pull(self, index: int, count: int) -> None:
        """One of `count` threads' share of the tiles."""
        for task, blobs in self._tasks[index::count]:
            self._mirror.apply(task, blobs)

    def holds(self) -> bool:
        """Whether the mirror has all of the new version."""
        return self._mirror.holds(_manifest(2, self._encoding.result()))


def _manifest(number: int, found: Encoded) -> Manifest:
    version = PolicyVersion(policy="policy", version=number, parent=number - 1, step=number)
    return seal_manifest("run", version, found.entries)


def _task(tile: int, digest: bytes, part: memoryview, blob: bytes) -> TileTask:
    dense, patches = (blob, ()) if blob == digest else (b"", (blob,))
    return TileTask(place=(0, tile), digest=digest, length=len(part), dense=dense, patches=patches, cost=0)
