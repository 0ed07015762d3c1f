"""Fetching policy versions from a weight-relay, holding one tile at a time beside the tensors."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from ebbtide.client.retry import Peer
from ebbtide.errors import ChunkCorrupt
from ebbtide.rpc.convert import from_proto
from ebbtide.types.weights import Manifest, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import Assembly, ManifestJoiner, ManifestPart, NamedTensor

#: Tiles asked for in one call: enough to keep the stream full, few enough to be asked for again after a break.
_FETCH: Final = 256


class Fetcher:
    """The weight-relay's calls for who reads."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub = WeightsStub(peer.channel)

    async def fetch(self, run_id: str, policy: str, version: int) -> tuple[Manifest, dict[str, NamedTensor]]:
        """A committed version (0: the newest), verified. Raises `VersionUnavailable`, `ChunkCorrupt`, `Unavailable`."""

        async def manifest_of() -> Manifest:
            joiner = ManifestJoiner()
            async for part in self._stub.GetManifest(pb.VersionRef(run_id=run_id, policy=policy, version=version)):
                joiner.add(from_proto(part, ManifestPart))
            return joiner.join()

        manifest = await self._peer.attempt(manifest_of)
        if (manifest.run_id, manifest.version.policy) != (run_id, policy) or version not in {
            0,
            manifest.version.version,
        }:
            raise ChunkCorrupt("the relay answered with another version's manifest; fetch again")
        assembly = await asyncio.to_thread(Assembly, manifest)

        async def some_tiles() -> None:
            async for tile in self._stub.FetchTiles(pb.FetchTilesRequest(digests=assembly.missing[:_FETCH])):
                await asyncio.to_thread(assembly.place, tile.digest, tile.data)

        while not assembly.complete:
            await self._peer.attempt(some_tiles)
        return manifest, assembly.tensors()

    async def versions(self, run_id: str, policy: str) -> AsyncGenerator[VersionInfo, None]:
        """The versions that the relay holds, then each new one, once each."""
        seen: set[int] = set()
        request = pb.WatchVersionsRequest(run_id=run_id, policy=policy)
        async for message in self._peer.follow(lambda: self._stub.WatchVersions(request)):
            if message.version.version not in seen:
                seen.add(message.version.version)
                yield from_proto(message, VersionInfo)
