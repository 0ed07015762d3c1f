"""The Weights service: convert, await one use-case, convert."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest
from ebbtide.rpc.convert import from_proto, to_proto
from ebbtide.types.ids import check_id
from ebbtide.types.weights import DIGEST_BYTES, PolicyVersion
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsServicer
from ebbtide.weight_relay.service import Relay
from ebbtide.weights import ManifestJoiner, ManifestPart, split_manifest

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Weights"
#: Digests in one answer: 100,000 take 3.4 MB of a message's 4 MiB. A publisher asks again for the rest.
MAX_DIGESTS = 100_000


class Servicer(WeightsServicer):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def BeginPublish(self, request: AsyncIterator[pb.ManifestPart], context: Context) -> pb.BeginPublishResponse:
        joiner = ManifestJoiner(self._relay.limits)
        async for part in request:
            joiner.add(from_proto(part, ManifestPart))
        missing = await self._relay.begin(joiner.join())
        return pb.BeginPublishResponse(missing=missing[:MAX_DIGESTS])

    async def PutTiles(self, request: AsyncIterator[pb.Tile], context: Context) -> pb.PutTilesResponse:
        stored = 0
        async for tile in request:
            await self._relay.put(_digest(tile.digest), tile.data)
            stored += 1
        await self._relay.sync()
        return pb.PutTilesResponse(stored=stored)

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: Context) -> pb.VersionInfo:
        version = from_proto(request.version, PolicyVersion, field="version")
        info = await self._relay.commit(check_id(request.run_id, field="run_id"), version)
        return to_proto(info, pb.VersionInfo)

    async def GetManifest(self, request: pb.VersionRef, context: Context) -> AsyncIterator[pb.ManifestPart]:
        manifest = self._relay.manifest(
            check_id(request.run_id, field="run_id"), check_id(request.policy, field="policy"), request.version
        )
        for part in split_manifest(manifest):
            yield to_proto(part, pb.ManifestPart)

    async def FetchTiles(self, request: pb.FetchTilesRequest, context: Context) -> AsyncIterator[pb.Tile]:
        for digest in request.digests:
            yield pb.Tile(digest=digest, data=await self._relay.tile(_digest(digest)))

    async def WatchVersions(self, request: pb.WatchVersionsRequest, context: Context) -> AsyncIterator[pb.VersionInfo]:
        run_id, policy = check_id(request.run_id, field="run_id"), check_id(request.policy, field="policy")
        async for info in self._relay.watch(run_id, policy):
            yield to_proto(info, pb.VersionInfo)


def _digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"must have {DIGEST_BYTES} bytes", field="digest")
    return digest
