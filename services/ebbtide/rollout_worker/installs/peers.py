"""Serves verified blobs to other workers, from this worker's cache and mirror: the part of the Weights service that
workers offer each other.

Invariant: every served blob matches its digest. This module keeps none.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final

import grpc

from ebbtide.auth.security import ClientSecurity, Credentials, ServerSettings
from ebbtide.errors import InvalidRequest, NoCapacity, VersionUnavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rpc.channel import check_address
from ebbtide.transfer import BlobCache, Mirror, check_peer
from ebbtide.types.weights import DIGEST_BYTES
from ebbtide.v1 import weights_pb2 as pb

#: Pause of a refused reader, which asks another source meanwhile.
_RETRY_S: Final = 2.0
#: Lets each stream end its current message.
_GRACE_S: Final = 1.0
#: Longest wait for an arriving blob: another source is faster then.
_PATIENCE_S: Final = 10.0
SERVICE: Final = "ebbtide.v1.Weights"
_ANYWHERE: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


class PeerBlobs:
    """The blobs that peers may read."""

    def __init__(self, cache: BlobCache, mirror: Callable[[], Mirror | None], most: int) -> None:
        """`mirror` returns the mirror in use now. `most`: readers at once."""
        self._cache, self._mirror, self._most = cache, mirror, most
        self.streams: Counter[str] = Counter()  # of each reader

    async def blobs(self, digests: Sequence[bytes], reader: str) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """The blobs in the order of `digests`; waits for one that is arriving.

        Raises `NoCapacity` for too many readers. Raises `VersionUnavailable` after all other blobs if some are neither
        here nor arriving: of an old keyframe and the patches that follow it, a worker holds the patches alone.
        """
        if reader not in self.streams and len(self.streams) == self._most:
            raise NoCapacity(f"{self._most} readers are served already; ask another source", retry_after_s=_RETRY_S)
        self.streams[reader] += 1
        metrics.PEER_STREAMS.set(self.streams.total())
        lacking: list[bytes] = []
        try:
            for digest in digests:
                if (data := await self._blob(digest)) is None:
                    lacking.append(digest)
                    continue
                metrics.SERVED_BYTES.inc(len(data))
                yield digest, data
            if lacking:
                what = f"{len(lacking)} blobs, {lacking[0].hex()[:16]} first"
                raise VersionUnavailable(f"this worker does not hold {what}; ask another source")
        finally:
            self.streams[reader] -= 1
            self.streams += Counter()  # removes readers without a stream
            metrics.PEER_STREAMS.set(self.streams.total())

    async def _blob(self, digest: bytes) -> bytes | None:
        data = self._cache.get(digest) or await self._dense(digest) or await self._cache.wait(digest, _PATIENCE_S)
        # A blob that the cache did not keep has reached the mirror by now.
        return await self._dense(digest) if data is None else data

    async def _dense(self, digest: bytes) -> bytes | None:
        mirror = self._mirror()
        return None if mirror is None else await asyncio.to_thread(mirror.read, digest)


class PeerListener:
    """Listens for peers, if the settings say so."""

    def __init__(self, settings: WorkerSettings, blobs: PeerBlobs, changed: Callable[[], None]) -> None:
        """`changed` is called when no peer should be sent here any more."""
        self._settings, self._blobs, self._changed = settings, blobs, changed
        self._address = ""

    @property
    def address(self) -> str:
        """The address for peers; empty while none is served."""
        return self._address

    @asynccontextmanager
    async def serving(self, leaving: asyncio.Event) -> AsyncGenerator[None, None]:
        """Serve until `leaving` is set; readers' streams end as `Unavailable` then.

        Raises `InvalidRequest` for an address that cannot be served.
        """
        settings = self._settings
        if not settings.peer_listen:
            yield
            return
        from ebbtide.rpc.server import Server

        at = server_settings(settings.peer_listen, settings.client, settings.token_keys)
        server = Server(at, [(add_to_server, PeerServicer(self._blobs), SERVICE)])
        with _as_peer_listen():
            await server.start()
        await server.set_serving(True)
        self._address = advertised(server.address, settings.peer_advertise)

        async def stop() -> None:
            self._address = ""
            self._changed()
            await server.stop(_GRACE_S)

        async def stop_early() -> None:
            await leaving.wait()
            await stop()

        stopping = asyncio.create_task(stop_early(), name="stop serving peers")
        try:
            yield
        finally:
            stopping.cancel()
            await asyncio.wait({stopping})
            await stop()


def check_reachable(settings: WorkerSettings) -> None:
    """Check that others can reach the addresses for peers. Raises `InvalidRequest` that names the setting."""
    listen, advertise = settings.peer_listen, settings.peer_advertise
    if not listen:
        if advertise:
            raise InvalidRequest("is useless to a worker that serves no peers: set peer_listen", field="peer_advertise")
        return
    if check_address(listen, field="peer_listen").startswith("unix:"):
        raise InvalidRequest("other machines reach no unix: socket: give host:port", field="peer_listen")
    host = (advertise or listen).rpartition(":")[0].strip("[]")
    if host in _ANYWHERE:
        raise InvalidRequest(f"is required: no peer reaches a worker at {host}", field="peer_advertise")
    check_peer(advertise or listen, field="peer_advertise" if advertise else "peer_listen")
    with _as_peer_listen():
        server_settings(listen, settings.client).credentials()


@contextmanager
def _as_peer_listen() -> Iterator[None]:
    """Rename the field `listen` in a server's error to `peer_listen`, as this worker's settings call it."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != "listen":
            raise
        raise InvalidRequest(error.text, field="peer_listen") from None


def server_settings(listen: str, client: ClientSecurity, token_keys: str = "") -> ServerSettings:
    """A server's settings with the secret and the certificate that the worker uses as a client."""
    shared = {name: getattr(client, name) for name in Credentials.__struct_fields__}
    return ServerSettings(listen=listen, token_keys=token_keys, **shared)


def advertised(bound: str, advertise: str) -> str:
    """The address that others get of a server that is `bound`."""
    host, _, port = advertise.rpartition(":")
    return f"{host}:{bound.rpartition(':')[2]}" if port == "0" else advertise or bound


class PeerServicer:
    """`FetchTiles` of the Weights service, over a `PeerBlobs`."""

    def __init__(self, peers: PeerBlobs) -> None:
        self._peers = peers

    async def FetchTiles(  # noqa: N802 - gRPC's name
        self,
        request: pb.FetchTilesRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - gRPC hands each method one
    ) -> AsyncIterator[pb.Tile]:
        if any(len(digest) != DIGEST_BYTES for digest in request.digests):
            raise InvalidRequest(f"must have {DIGEST_BYTES} bytes", field="digest")
        async with aclosing(self._peers.blobs(request.digests, request.reader)) as blobs:
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
