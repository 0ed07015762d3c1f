"""Reads manifests, patches, ways and blobs of committed and arriving versions, and announces new versions."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from ebbtide.errors import ChunkCorrupt, VersionUnavailable
from ebbtide.scheduling.distribution.retained_bytes import Node
from ebbtide.scheduling.distribution.version_paths import find_ways
from ebbtide.types.weights import FoundWay, Manifest, Patch, VersionInfo
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.patch_composer import PatchComposer
from ebbtide.weight_relay.library.relay_disk import disk_errors
from ebbtide.weight_relay.library.version_library import VersionLibrary
from ebbtide.weight_relay.library.version_retirement import VersionRetirement

#: How often a reader that waits for a blob keeps its stage alive, as a share of a stage's lifetime.
_SIGN_OF_LIFE: Final = 0.25


class VersionReader:
    def __init__(self, library: VersionLibrary, retirement: VersionRetirement, composer: PatchComposer) -> None:
        self._library, self._retirement, self._composer = library, retirement, composer

    def manifest(self, run_id: str, policy: str, version: int) -> Manifest:
        """The manifest of a committed or arriving version (0: the newest). Raises `VersionUnavailable`."""
        index, now = self._library.index, self._library.clock()
        manifest = index.readable_manifest(run_id, policy, version)
        number = manifest.version.version
        if stage := index.stage_of((run_id, policy), number, arriving=True):
            stage.used_at = now
        elif holding := index.stream((run_id, policy)).get(number):
            holding.used_at = now
        return manifest

    def patch(self, run_id: str, policy: str, base: int, version: int) -> Patch:
        """The patch between two versions. Raises `VersionUnavailable` if there is none."""
        if edge := self._library.index.patches((run_id, policy)).get((base, version)):
            edge.used_at = self._library.clock()
        return self._library.index.readable_patch((run_id, policy), (base, version))

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
        """Ways to a version (0: the newest) from those in `have`, cheapest first; with `scratch` from anchors too.

        Composes the patches of the cheapest way if a reader that fetches at `bytes_per_s` (0: unknown) gains by it.
        Raises `VersionUnavailable` if the version is not here.
        """
        stream, index = (run_id, policy), self._library.index
        number = self.manifest(run_id, policy, version).version.version
        held = list(have)
        found = find_ways(*index.graph(stream), number, held, scratch=scratch)
        if found and len(found[0].via) > 1:
            await self._composer.improve(stream, found[0], bytes_per_s)
            found = find_ways(*index.graph(stream), number, held, scratch=scratch)
        if not found:
            raise VersionUnavailable(f"no way leads to version {number} of {policy} any more; ask for a newer one")
        return found

    async def tile(self, digest: bytes) -> bytes:
        """A blob, verified. Waits for it if an arriving version needs it. Raises `VersionUnavailable` if none has it.

        Raises `ChunkCorrupt` if the blob is damaged on disk; the versions that need it are then dropped.
        """
        await self._arrived(digest)
        try:
            with disk_errors():
                data = await asyncio.to_thread(self._library.read_verified, digest)
        except (FileNotFoundError, ChunkCorrupt) as error:
            raise await self._library.finish(self._retirement.withdraw_blob(digest, str(error))) from None
        metrics.BYTES_OUT.inc(len(data))
        return data

    async def _arrived(self, digest: bytes) -> None:
        index = self._library.index
        while not index.serves(digest):
            stage = index.arriving(digest)
            if stage is None:
                raise VersionUnavailable(
                    f"no version held here has tile {digest[:32].hex()}; ask for the manifest again"
                )
            stage.used_at = self._library.clock()
            if digest in index.on_disk:
                return
            await self._library.arrival(digest, self._library.settings.stage_ttl_s * _SIGN_OF_LIFE)

    async def watch(self, run_id: str = "", policy: str = "") -> AsyncIterator[VersionInfo]:
        """Yield the versions held, oldest first, then each new one; of all runs and policies if none is named."""
        seen: set[Node] = set()
        while True:
            changed = self._library.changed
            held = self._held(run_id, policy)
            for node in sorted(held.keys() - seen):
                yield held[node]
            seen = set(held)
            await changed.wait()

    def _held(self, run_id: str, policy: str) -> dict[Node, VersionInfo]:
        index = self._library.index
        return {
            (stream, version): holding.info
            for stream in index.streams()
            if run_id in {"", stream[0]} and policy in {"", stream[1]}
            for version, holding in index.whole(stream).items()
        }
