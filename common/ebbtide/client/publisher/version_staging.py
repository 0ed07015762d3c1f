"""Puts a version at a weight-relay: stages it, fills it with the blobs that are missing, commits it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from typing import TypeVar

import grpc

from ebbtide.client.service_peer import ServicePeer
from ebbtide.rpc.channel import write, write_first
from ebbtide.types.weights import Manifest, Patch, PolicyVersion
from ebbtide.v1 import types_pb2
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import ManifestPart, split_manifest, split_patch
from ebbtide.weights.version_encoding import Encoding
from ebbtide.wire.record_conversion import from_proto, to_proto

M = TypeVar("M")
R = TypeVar("R")


class VersionStaging:
    """Makes a publisher's calls to the relay. All are idempotent and raise the relay's errors."""

    def __init__(self, peer: ServicePeer, run_id: str) -> None:
        self.peer, self._run_id = peer, run_id
        self._stub = WeightsStub(peer.channel)

    async def begin(self, manifest: Manifest, patch: Patch | None) -> list[bytes]:
        """Stage the version; returns missing blobs, perhaps not all of them, but none only if none is missing."""
        with self.peer.translated():
            answer: pb.BeginPublishResponse = await _send(self._stub.BeginPublish(), _each(_parts(manifest, patch)))
        return list(answer.missing)

    async def put(
        self, version: PolicyVersion, encoding: Encoding, digests: Iterable[bytes], sent: Callable[[int], None]
    ) -> bytes | None:
        """Send blobs of a staged version and wait until all are stored.

        `sent` gets the bytes of each blob handed to the connection. Returns the blobs that the version still lacks
        (`read_missing`); None: the relay does not know.
        """

        async def tiles() -> AsyncGenerator[pb.Tile, None]:
            tile = self._first(version)
            for digest in digests:
                tile.digest, tile.data = digest, await asyncio.to_thread(_blob, encoding, digest)
                yield tile
                sent(len(tile.data))
                tile = pb.Tile()

        with self.peer.translated():
            return _missing(await _send(self._stub.PutTiles(), tiles()))

    async def missing(self, version: PolicyVersion) -> bytes | None:
        """Return the blobs that a staged version still lacks, as `put` does."""
        with self.peer.translated():
            return _missing(await _send(self._stub.PutTiles(), _each([self._first(version)])))

    def _first(self, version: PolicyVersion) -> pb.Tile:
        return pb.Tile(run_id=self._run_id, version=to_proto(version, types_pb2.PolicyVersion))

    async def commit(self, manifest: Manifest) -> PolicyVersion:
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        request = pb.CommitPublishRequest(run_id=manifest.run_id, version=version)
        with self.peer.translated():
            return from_proto((await self._stub.CommitPublish(request)).version, PolicyVersion)


def _blob(encoding: Encoding, digest: bytes) -> bytes:
    return bytes(encoding.blob(digest))


def _missing(answer: pb.PutTilesResponse) -> bytes | None:
    return answer.missing if answer.HasField("missing") else None


def _parts(manifest: Manifest, patch: Patch | None) -> Iterator[pb.ManifestPart]:
    for part in split_manifest(manifest):
        yield to_proto(part, pb.ManifestPart)
    for patched in split_patch(patch) if patch else ():
        yield to_proto(ManifestPart(patch=patched), pb.ManifestPart)


async def _each(items: Iterable[M]) -> AsyncGenerator[M, None]:
    for item in items:
        yield item


async def _send(call: "grpc.aio.StreamUnaryCall[M, R]", messages: AsyncIterable[M]) -> R:
    """Write all messages and return the answer. gRPC itself would turn an error of `messages` into a cancellation."""
    first = True
    try:
        async for message in messages:
            await (write_first if first else write)(call, message)
            first = False
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass  # the service answered early: the call below returns or raises its answer
    except BaseException:
        call.cancel()
        raise
    return await call
