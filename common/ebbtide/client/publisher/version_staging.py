"""A version put at a weight-relay: staged, filled with the blobs that are missing, committed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import TypeVar

import grpc

from ebbtide.client.service_peer import ServicePeer
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
    """The relay's calls for who publishes. Each raises the relay's errors; all may be repeated."""

    def __init__(self, peer: ServicePeer, run_id: str) -> None:
        self.peer, self._run_id = peer, run_id
        self._stub = WeightsStub(peer.channel)

    async def begin(self, manifest: Manifest, patch: Patch | None) -> list[bytes]:
        """Stage the version; returns blobs that are missing, not always all of them, or nothing if none are."""
        with self.peer.translated():
            answer: pb.BeginPublishResponse = await _send(self._stub.BeginPublish(), _parts(manifest, patch))
        return list(answer.missing)

    async def put(self, encoding: Encoding, digests: Iterable[bytes]) -> AsyncIterator[int]:
        """Send blobs; yields the bytes of each as it is handed to the connection, and ends when all are stored."""
        call, run_id = self._stub.PutTiles(), self._run_id
        with self.peer.translated():
            try:
                for digest in digests:
                    data = await asyncio.to_thread(_blob, encoding, digest)
                    await call.write(pb.Tile(digest=digest, data=data, run_id=run_id))
                    run_id = ""  # the first says it for all
                    yield len(data)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the relay has answered before the end; what it said comes below
            except BaseException:
                call.cancel()
                raise
            await call

    async def commit(self, manifest: Manifest) -> PolicyVersion:
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        request = pb.CommitPublishRequest(run_id=manifest.run_id, version=version)
        with self.peer.translated():
            return from_proto((await self._stub.CommitPublish(request)).version, PolicyVersion)


def _blob(encoding: Encoding, digest: bytes) -> bytes:
    return bytes(encoding.blob(digest))


def _parts(manifest: Manifest, patch: Patch | None) -> Iterator[pb.ManifestPart]:
    for part in split_manifest(manifest):
        yield to_proto(part, pb.ManifestPart)
    for patched in split_patch(patch) if patch else ():
        yield to_proto(ManifestPart(patch=patched), pb.ManifestPart)


async def _each(items: Iterable[M]) -> AsyncGenerator[M, None]:
    for item in items:
        yield item


async def _send(call: "grpc.aio.StreamUnaryCall[M, R]", messages: Iterable[M]) -> R:
    """Write all messages and return the answer. Handed to gRPC, an error of `messages` would end as a cancellation."""
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
    except asyncio.InvalidStateError:
        pass  # the service has answered before the end; what it said comes below
    except BaseException:
        call.cancel()
        raise
    return await call
