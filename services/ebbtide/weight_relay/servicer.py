"""Serves the Weights service. Each call converts the request, awaits one use case, and converts the answer."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from ebbtide.auth.admission import is_among_peers
from ebbtide.errors import InvalidRequest
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.ids import check_id
from ebbtide.types.weights import DIGEST_BYTES, PolicyVersion
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.types_pb2 import RunsEnded, WatchEndedRequest
from ebbtide.v1.weights_pb2_grpc import WeightsServicer
from ebbtide.weight_relay.intake.publishing import JoinedPublish, refusals
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.run_ends import RunEndFollower
from ebbtide.weight_relay.serving import FanOut, VersionReader
from ebbtide.weights import ManifestLimits, ManifestPart, split_manifest, split_patch
from ebbtide.wire import from_proto, to_proto

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Weights"
#: Digests in one answer: 100,000 take 3.4 MB of a message's 4 MiB. PutTiles returns the rest in fewer bytes.
MAX_DIGESTS = 100_000


class RelayServicer(WeightsServicer):
    def __init__(
        self,
        intake: VersionIntake,
        reader: VersionReader,
        fanout: FanOut,
        ends: RunEndFollower,
        limits: ManifestLimits,
    ) -> None:
        self._intake, self._reader, self._fanout, self._ends = intake, reader, fanout, ends
        self._joining = JoinedPublish(limits)

    async def BeginPublish(self, request: AsyncIterator[pb.ManifestPart], context: Context) -> pb.BeginPublishResponse:
        with refusals("publish", context.peer()):
            parts = (from_proto(part, ManifestPart) async for part in request)
            missing = await self._intake.begin(*await self._joining.join(parts))
        return pb.BeginPublishResponse(missing=missing[:MAX_DIGESTS])

    async def PutTiles(self, request: AsyncIterator[pb.Tile], context: Context) -> pb.PutTilesResponse:
        stored, first, missing = 0, None, None
        with refusals("blob", context.peer()):
            async for tile in request:
                if first is None:
                    first = tile
                    if tile.HasField("version") and not tile.digest:
                        continue  # a request for what is missing, without a blob
                await self._intake.put(_digest(tile.digest), tile.data)
                stored += 1
        await self._intake.sync()
        if first is not None and first.HasField("version"):
            version = from_proto(first.version, PolicyVersion, field="version")
            missing = self._intake.missing(check_id(first.run_id, field="run_id"), version)
        return pb.PutTilesResponse(stored=stored, missing=missing)

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: Context) -> pb.VersionInfo:
        version = from_proto(request.version, PolicyVersion, field="version")
        with refusals("commit", context.peer()):
            info = await self._intake.commit(check_id(request.run_id, field="run_id"), version)
        return to_proto(info, pb.VersionInfo)

    async def GetManifest(self, request: pb.VersionRef, context: Context) -> AsyncIterator[pb.ManifestPart]:
        run_id, policy = check_id(request.run_id, field="run_id"), check_id(request.policy, field="policy")
        version = await self._fanout.ask(run_id, policy, request.version)
        manifest = self._reader.manifest(run_id, policy, version)
        for part in split_manifest(manifest):
            yield to_proto(part, pb.ManifestPart)

    async def GetPatch(self, request: pb.PatchRef, context: Context) -> AsyncIterator[pb.PatchPart]:
        run_id, policy = check_id(request.run_id, field="run_id"), check_id(request.policy, field="policy")
        for part in split_patch(self._reader.patch(run_id, policy, request.base, request.version)):
            yield to_proto(part, pb.PatchPart)

    async def FindWay(self, request: pb.FindWayRequest, context: Context) -> pb.FindWayResponse:
        asked = from_proto(request, PathRequest)
        check_id(asked.run_id, field="run_id")
        check_id(asked.policy, field="policy")
        found = await self._fanout.find(asked, peer=is_among_peers())
        return to_proto(found, pb.FindWayResponse)

    async def FetchTiles(self, request: pb.FetchTilesRequest, context: Context) -> AsyncIterator[pb.Tile]:
        turn = self._fanout.reader(request.site, request.reader, context.peer())
        for digest in request.digests:
            data = await self._reader.tile(_digest(digest))
            await turn(len(data))
            yield pb.Tile(digest=digest, data=data)

    async def DescribeVersions(
        self, request: pb.DescribeVersionsRequest, context: Context
    ) -> pb.DescribeVersionsResponse:
        return to_proto(self._fanout.describe(check_id(request.run_id, field="run_id")), pb.DescribeVersionsResponse)

    async def WatchVersions(self, request: pb.WatchVersionsRequest, context: Context) -> AsyncIterator[pb.VersionInfo]:
        run_id = check_id(request.run_id, field="run_id") if request.run_id else ""
        policy = check_id(request.policy, field="policy") if request.policy else ""
        async for info in self._reader.watch(run_id, policy):
            yield to_proto(info, pb.VersionInfo)

    async def WatchEnded(self, request: WatchEndedRequest, context: Context) -> AsyncIterator[RunsEnded]:
        async for ended in self._ends.answer(tuple(request.held)):
            yield to_proto(ended, RunsEnded)


def _digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"must have {DIGEST_BYTES} bytes", field="digest")
    return digest
