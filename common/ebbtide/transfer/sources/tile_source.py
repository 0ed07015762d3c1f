"""Opens sources of blobs. No source is trusted: the puller checks what it sends."""

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, Protocol, TypeAlias

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import InvalidRequest, NotReady, Unavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.types.weights import BlobSource, Holder
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub

_PEER: Final = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]{1,253})|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
#: Prefixes that gRPC reads as another kind of address, although they look like a host's name.
_SCHEMES: Final = frozenset({"unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds", "google-c2p"})


class TileSource(Protocol):
    """Streams blobs, in several streams at once if asked."""

    def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """Yield digest and data of blobs, in any order. Raises `Unavailable` when it breaks, `VersionUnavailable` if it
        lacks one of them."""
        ...

    async def close(self) -> None: ...


#: Opens a source for a reader.
Opener: TypeAlias = Callable[[BlobSource, Holder], TileSource]


class GrpcSource:
    """A Weights service: a relay, or a peer."""

    def __init__(
        self, stub: WeightsStub, target: str, reader: Holder, channel: "Closable | None" = None, *, run_id: str = ""
    ) -> None:
        """`channel` is closed with it, if given. `run_id`: the run of all blobs asked for, if it is known."""
        self._stub, self._target, self._reader, self._channel = stub, target, reader, channel
        self._run_id = run_id
        self._closed = False

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        if self._closed:
            raise Unavailable(f"source of weights at {self._target} was closed")
        reader = self._reader
        request = pb.FetchTilesRequest(digests=digests, reader=reader.name, site=reader.site, run_id=self._run_id)
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


def check_peer(address: str, *, field: str) -> str:
    """Return `address` if it is the host:port of a service, and no other address that gRPC understands; raise
    `InvalidRequest` naming `field` otherwise. One caller's address may be given to a whole fleet."""
    found = _PEER.fullmatch(address)
    if found is None or int(found["port"]) >= 1 << 16 or (found["name"] or "").lower() in _SCHEMES:
        raise InvalidRequest(f"{address!r} is no address of a peer: give host:port", field=field)
    return address


def opener(security: ClientSecurity) -> Opener:
    """Return an opener: of static copies by URL if the relay names them so, and of holders by host:port.

    Before it connects, the opener raises `InvalidRequest` for any other address, and `NotReady` for a holder that must
    not see the token."""

    def open_source(source: BlobSource, reader: Holder) -> TileSource:
        if source.static:
            return _static_copy(source.address)
        address = check_peer(source.address, field="address")
        security.check_peers()
        channel = open_channel(address, security)
        return GrpcSource(WeightsStub(channel), source.address, reader, channel)

    return open_source


def _static_copy(url: str) -> TileSource:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no URL of a static copy: give http:// or https://", field="address")
    try:
        from ebbtide.transfer.sources.static_source import StaticSource
    except ImportError:
        raise NotReady("static copies are read with aiohttp, which is not installed: pip install aiohttp") from None
    return StaticSource(url)
