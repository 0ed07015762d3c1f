"""Those of whom blobs may be had. What they send is for the puller to check: no source is trusted."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeAlias

from ebbtide.errors import InvalidRequest, NotReady, Unavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.security import ClientSecurity
from ebbtide.rpc.status import translated
from ebbtide.types.weights import BlobSource, Holder
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub


class Source(Protocol):
    """Streams of blobs, several at once if need be."""

    def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """Digest and data of blobs, in any order. Raises `Unavailable` when it breaks, `VersionUnavailable` if it has
        not got one of them."""
        ...

    async def close(self) -> None: ...


#: Opens a source for a reader, who says who it is.
Opener: TypeAlias = Callable[[BlobSource, Holder], Source]


class GrpcSource:
    """A Weights service: a relay, or a peer."""

    def __init__(self, stub: WeightsStub, target: str, reader: Holder, channel: "Closable | None" = None) -> None:
        """`channel` is closed with it, if given."""
        self._stub, self._target, self._reader, self._channel = stub, target, reader, channel
        self._closed = False

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        if self._closed:
            raise Unavailable(f"source of weights at {self._target} was closed")
        request = pb.FetchTilesRequest(digests=digests, reader=self._reader.name, site=self._reader.site)
        call = self._stub.FetchTiles(request)
        try:
            with translated("source of weights", self._target):
                async for tile in call:
                    yield tile.digest, tile.data
        finally:
            call.cancel()

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


class Closable(Protocol):
    async def close(self) -> None: ...


def opener(security: ClientSecurity) -> Opener:
    """Opens sources by their addresses: host:port of a Weights service, or the URL of a static copy."""

    def open_source(source: BlobSource, reader: Holder) -> Source:
        if source.address.startswith(("http://", "https://")):
            try:
                from ebbtide.transfer.http import HttpSource
            except ImportError:
                raise NotReady(
                    "static copies are read with aiohttp, which is not installed: pip install aiohttp"
                ) from None
            return HttpSource(source.address)
        if "://" in source.address:
            raise InvalidRequest(f"{source.address!r} is neither host:port nor a URL of http", field="address")
        channel = open_channel(source.address, security)
        return GrpcSource(WeightsStub(channel), source.address, reader, channel)

    return open_source
