"""Shows manifests, patches, ways and blobs of committed and arriving versions, and which versions are new."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from ebbtide.errors import ChunkCorrupt, VersionUnavailable
from ebbtide.scheduling.distribution.version_paths import find_ways
from ebbtide.types.weights import FoundWay, Manifest, Patch, VersionInfo
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.library.version_records import Node
from ebbtide.weight_relay.library.version_retirement import VersionRetirement

#: How often one who waits for a blob tells the stage that somebody does, as a share of a stage's life.
_SIGN_OF_LIFE: Final = 0.25


class VersionReader:
    def __init__(self, shelf: VersionLibrary, retiring: VersionRetirement, composing: PatchComposer) -> None:
        self._shelf, self._retiring, self._composing = shelf, retiring, composing

    def manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """The manifest of a version that is committed or arriving, of the newest for 0. Raises `VersionUnavailable`."""
        index, now = self._shelf.index, self._shelf.clock()
        manifest = index.readable_manifest(run_id, policy, version)
        number = manifest.version.version
        if stage := index.stage_of((run_id, policy), number, arriving=True):
            stage.used_at = now
        elif holding := index.stream((run_id, policy)).get(number):
            holding.used_at = now
        return manifest

    def patch(self, run_id: str, policy: str, base: int, version: int) -> Patch:
        """The patch between two versions. Raises `VersionUnavailable` if there is none."""
        if edge := self._shelf.index.patches((run_id, policy)).get((base, version)):
            edge.used_at = self._shelf.clock()
        return self._shelf.index.readable_patch((run_id, policy), (base, version))

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

        Composes the patches of the cheapest if a reader that fetches at `bytes_per_s` (0: unknown) gains by it.
        Raises `VersionUnavailable` if the version is not here.
        """
        stream, index = (run_id, policy), self._shelf.index
        number = self.manifest(run_id, policy, version).version.version
        held = list(have)
        found = find_ways(*index.graph(stream), number, held, scratch=scratch)
        if found and len(found[0].via) > 1:
            await self._composing.improve(stream, found[0], bytes_per_s)
            found = find_ways(*index.graph(stream), number, held, scratch=scratch)
        if not found:
            raise VersionUnavailable(f"no way leads to version {number} of {policy} any more; ask for a newer one")
        return found

    async def tile(self, digest: bytes) -> bytes:
        """A blob, verified; waited for if an arriving version takes it. Raises `VersionUnavailable` if none has it.

        Raises `ChunkCorrupt` if the disk does not hold it as it was; what stands on it is let go then.
        """
        await self._arrived(digest)
        try:
            with disk_errors():
                data = await asyncio.to_thread(self._shelf.read_verified, digest)
        except (FileNotFoundError, ChunkCorrupt) as error:
            raise await self._shelf.finish(self._retiring.withdraw_blob(digest, str(error))) from None
        metrics.BYTES_OUT.inc(len(data))
        return data

    async def _arrived(self, digest: bytes) -> None:
        index = self._shelf.index
        while not index.serves(digest):
            stage = index.arriving(digest)
            if stage is None:
                raise VersionUnavailable(
                    f"no version held here has tile {digest[:32].hex()}; ask for the manifest again"
                )
            stage.used_at = self._shelf.clock()
            if digest in index.on_disk:
                return
            await self._shelf.arrival(digest, self._shelf.settings.stage_ttl_s * _SIGN_OF_LIFE)

    async def watch(self, run_id: str = "", policy: str = "") -> AsyncIterator[VersionInfo]:
        """The versions held, of all runs and policies where none is named, then each new one as it is committed.

        Oldest first. A version that is let go meanwhile is told all the same.
        """
        seen: set[Node] = set()
        while True:
            changed = self._shelf.changed
            held = self._held(run_id, policy)
            for node in sorted(held.keys() - seen):
                yield held[node]
            seen = set(held)
            await changed.wait()

    def _held(self, run_id: str, policy: str) -> dict[Node, VersionInfo]:
        index = self._shelf.index
        return {
            (stream, version): holding.info
            for stream in index.streams()
            if run_id in {"", stream[0]} and policy in {"", stream[1]}
            for version, holding in index.whole(stream).items()
        }
