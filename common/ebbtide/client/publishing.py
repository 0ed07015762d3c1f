"""Publishing policy versions at a weight-relay, holding one tile at a time beside the tensors."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import grpc

from ebbtide.client.retry import Peer
from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.rpc.convert import from_proto, to_proto
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.v1 import types_pb2
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import NamedTensor, build_manifest, named_tensor, slice_tiles, split_manifest

M = TypeVar("M")
R = TypeVar("R")
#: Tensors by name, or pairs of name and tensor. Anything that can be iterated twice is read one tensor at a time.
Tensors = Mapping[str, Any] | Iterable[NamedTensor | tuple[str, Any]]

#: How often a publish begins again when the relay forgot its stage, or refused a tile, before giving up.
_ROUNDS: Final = 3


class Publisher:
    """The weight-relay's calls for who publishes."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._stub = WeightsStub(peer.channel)

    async def publish(self, run_id: str, version: PolicyVersion, tensors: Tensors) -> PolicyVersion:
        """Make `tensors` a committed version; sends only tiles that the relay lacks. Returns it with its root digest.

        Raises `InvalidRequest` naming a tensor that cannot be published or that changed meanwhile, `AlreadyExists` for
        a number in use, `NoCapacity` and `Unavailable` once the patience is used up.
        """
        source = Source(tensors)
        manifest = await asyncio.to_thread(build_manifest, run_id, version, source.read())

        async def work() -> PolicyVersion:
            return await self._publish_once(manifest, source)

        return await self._peer.attempt(work, on=(Unavailable, NoCapacity))

    async def _publish_once(self, manifest: Manifest, source: "Source") -> PolicyVersion:
        for left in reversed(range(_ROUNDS)):
            try:
                with self._peer.translated():
                    return await self._round(manifest, source)
            except (NotReady, InvalidRequest) as error:
                # A relay that restarted in between forgot the stage: begin again.
                if not left or (isinstance(error, InvalidRequest) and error.field != "digest"):
                    raise
            except ChunkCorrupt as error:
                if not left:
                    raise InvalidRequest(f"changed while it was published ({error})", field="tensors") from None
        raise NotReady("not committed")

    async def _round(self, manifest: Manifest, source: "Source") -> PolicyVersion:
        while missing := await self._begin(manifest):
            await self._put(manifest, source, set(missing))
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        request = pb.CommitPublishRequest(run_id=manifest.run_id, version=version)
        return from_proto((await self._stub.CommitPublish(request)).version, PolicyVersion)

    async def _begin(self, manifest: Manifest) -> list[bytes]:
        call = self._stub.BeginPublish()
        parts = (to_proto(part, pb.ManifestPart) for part in split_manifest(manifest))
        answer: pb.BeginPublishResponse = await _send(call, _each(parts))
        return list(answer.missing)

    async def _put(self, manifest: Manifest, source: "Source", missing: set[bytes]) -> None:
        await _send(self._stub.PutTiles(), source.tiles(manifest, missing))


class Source:
    """The publisher's tensors, to be read twice: for their digests, and for the tiles that the relay lacks.

    A one-shot iterator is kept as a list; a mapping, a list or an object with `__iter__` is read anew each time.
    """

    def __init__(self, tensors: Tensors) -> None:
        if isinstance(tensors, Mapping):
            tensors = tensors.items()
        self._items = list(tensors) if isinstance(tensors, Iterator) else tensors

    def read(self) -> Iterator[NamedTensor]:
        for item in self._items:
            yield item if isinstance(item, NamedTensor) else named_tensor(*item)

    async def tiles(self, manifest: Manifest, wanted: set[bytes]) -> AsyncGenerator[pb.Tile, None]:
        """The wanted tiles, once each. Raises `InvalidRequest` if these are not the manifest's tensors any more."""
        tensors = self.read()
        for entry in manifest.tensors:
            tensor = await asyncio.to_thread(next, tensors, None)
            if tensor is None or (tensor.name, tensor.data.nbytes) != (entry.name, entry.size):
                raise InvalidRequest(
                    "is not there, or of another size, when read again for its tiles", field=entry.name
                )
            for digest, tile in zip(entry.digests, slice_tiles(tensor, manifest.tile_bytes), strict=True):
                if digest in wanted:
                    wanted.remove(digest)
                    yield pb.Tile(digest=digest, data=bytes(tile))


async def _each(items: Iterable[M]) -> AsyncGenerator[M, None]:
    for item in items:
        yield item


async def _send(call: "grpc.aio.StreamUnaryCall[M, R]", messages: AsyncIterator[M]) -> R:
    """Write all messages and return the answer. Handed to gRPC, an error of `messages` would end as a cancellation."""
    try:
        async for message in messages:
            await call.write(message)
        await call.done_writing()
    except asyncio.InvalidStateError:
        pass  # the service has answered before the end; what it said comes below
    except BaseException:
        call.cancel()
        raise
    return await call
