"""Serves the part of the Weights service that a worker offers to other workers: blobs alone."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.installs.peer_blobs import PeerBlobs
from ebbtide.types.weights import DIGEST_BYTES
from ebbtide.v1 import weights_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "ebbtide.v1.Weights"


class PeerServicer:
    """Converts, awaits the shelf, converts."""

    def __init__(self, shelf: PeerBlobs) -> None:
        self._shelf = shelf

    async def FetchTiles(self, request: pb.FetchTilesRequest, context: Context) -> AsyncIterator[pb.Tile]:
        if any(len(digest) != DIGEST_BYTES for digest in request.digests):
            raise InvalidRequest(f"must have {DIGEST_BYTES} bytes", field="digest")
        async with aclosing(self._shelf.blobs(request.digests, request.reader)) as blobs:
            async for digest, data in blobs:
                yield pb.Tile(digest=digest, data=data)


def add_to_server(servicer: PeerServicer, server: grpc.aio.Server) -> None:
    """Register the one method: gRPC answers UNIMPLEMENTED for the others of the service."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.FetchTiles,
        request_deserializer=pb.FetchTilesRequest.FromString,
        response_serializer=pb.Tile.SerializeToString,
    )
    handlers = {"FetchTiles": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
