"""The calls of the Weights contract, as a publisher or a reader of its own would make them."""

from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from ebbtide.client.service_peer import ServicePeer
from ebbtide.types.weights import FetchPath, Manifest, Patch
from ebbtide.v1 import types_pb2, weights_pb2
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import (
    ManifestJoiner,
    ManifestPart,
    PatchJoiner,
    PatchPart,
    split_manifest,
    split_patch,
)
from ebbtide.wire import from_proto, to_proto

T = TypeVar("T")


class Wire:
    """The calls of the contract, one by one, without the SDK's repetitions."""

    def __init__(self, peer: ServicePeer) -> None:
        self._peer = peer
        self.stub = WeightsStub(peer.channel)

    async def begin(self, manifest: Manifest, patch: Patch | None = None) -> list[bytes]:
        parts = [to_proto(part, weights_pb2.ManifestPart) for part in split_manifest(manifest)]
        pieces = split_patch(patch) if patch else ()
        parts += [weights_pb2.ManifestPart(patch=to_proto(part, weights_pb2.PatchPart)) for part in pieces]
        with self._peer.translated():
            return list((await self.stub.BeginPublish(each(parts))).missing)

    async def put(self, tiles: dict[bytes, bytes]) -> int:
        messages = [weights_pb2.Tile(digest=digest, data=data) for digest, data in tiles.items()]
        with self._peer.translated():
            return (await self.stub.PutTiles(each(messages))).stored

    async def commit(self, manifest: Manifest) -> weights_pb2.VersionInfo:
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        request = weights_pb2.CommitPublishRequest(run_id=manifest.run_id, version=version)
        with self._peer.translated():
            return await self.stub.CommitPublish(request)

    async def publish(self, manifest: Manifest, blobs: dict[bytes, bytes], patch: Patch | None = None) -> None:
        missing = await self.begin(manifest, patch)
        await self.put({digest: blobs[digest] for digest in missing})
        await self.commit(manifest)

    async def manifest(self, version: int, run_id: str = "run") -> Manifest:
        joiner = ManifestJoiner()
        with self._peer.translated():
            reference = weights_pb2.VersionRef(run_id=run_id, policy="policy", version=version)
            async for part in self.stub.GetManifest(reference):
                joiner.add(from_proto(part, ManifestPart))
        return joiner.join()

    async def patch(self, base: int, target: Manifest) -> Patch:
        joiner = PatchJoiner(target)
        number = target.version.version
        reference = weights_pb2.PatchRef(run_id=target.run_id, policy="policy", base=base, version=number)
        with self._peer.translated():
            async for part in self.stub.GetPatch(reference):
                joiner.add(from_proto(part, PatchPart))
        return joiner.join()

    async def ways(
        self, version: int, have: Iterable[int] = (), *, bytes_per_s: float = 0.0, scratch: bool = False
    ) -> list[FetchPath]:
        request = weights_pb2.FindWayRequest(
            run_id="run", policy="policy", version=version, have=have, bytes_per_s=bytes_per_s, scratch=scratch
        )
        with self._peer.translated():
            answer = await self.stub.FindWay(request)
        return [from_proto(way, FetchPath) for way in answer.ways]

    async def fetch(self, digests: Iterable[bytes], most: int = 1000) -> dict[bytes, bytes]:
        """The first `most` tiles of a fetch, which then is broken off."""
        found: dict[bytes, bytes] = {}
        call = self.stub.FetchTiles(weights_pb2.FetchTilesRequest(digests=digests))
        with self._peer.translated():
            async for tile in call:
                found[tile.digest] = tile.data
                if len(found) == most:
                    call.cancel()
                    break
        return found


async def each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
