"""Serves blobs that this worker verified to other workers, from its cache and its mirror.

Invariant: every blob that is served matches its digest. Nothing is kept here.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from ebbtide.auth.security import ClientSecurity, Credentials, ServerSettings
from ebbtide.errors import InvalidRequest, NoCapacity, VersionUnavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rpc.channel import check_address
from ebbtide.transfer import BlobCache, Mirror, check_peer

#: A reader that is turned away asks another source meanwhile.
_RETRY_S: Final = 2.0
#: Lets each stream end its current message.
_GRACE_S: Final = 1.0
#: Readers get a blob that takes longer to arrive here from another source sooner.
_PATIENCE_S: Final = 10.0
_ANYWHERE: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - told apart, not bound


class PeerBlobs:
    """The blobs that peers may read."""

    def __init__(self, cache: BlobCache, mirror: Callable[[], Mirror | None], most: int) -> None:
        """`mirror` gives the mirror in use now. `most`: readers at once."""
        self._cache, self._mirror, self._most = cache, mirror, most
        #: Streams of each reader.
        self.streams: Counter[str] = Counter()
        self.address = ""  # under which others reach it; empty: it is not served

    async def blobs(self, digests: Sequence[bytes], reader: str) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """The blobs in the order asked for; one that is still arriving is waited for.

        Raises `NoCapacity` beyond so many readers, and after all other blobs `VersionUnavailable` if some are neither
        here nor arriving: of an old anchor and the patches that follow it, a worker holds the patches alone.
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
            self.streams += Counter()  # forgets readers without a stream
            metrics.PEER_STREAMS.set(self.streams.total())

    async def _blob(self, digest: bytes) -> bytes | None:
        data = self._cache.get(digest) or await self._dense(digest) or await self._cache.wait(digest, _PATIENCE_S)
        # A blob that the cache did not keep has reached the mirror by now.
        return await self._dense(digest) if data is None else data

    async def _dense(self, digest: bytes) -> bytes | None:
        mirror = self._mirror()
        return None if mirror is None else await asyncio.to_thread(mirror.read, digest)


@asynccontextmanager
async def serving(
    settings: WorkerSettings, shelf: PeerBlobs, leaving: asyncio.Event, changed: Callable[[], None]
) -> AsyncGenerator[None, None]:
    """Serve the shelf, if the settings say so, until `leaving` is set; readers' streams end as `Unavailable` then.

    `changed` is called when no peer should be sent here any more.
    Raises `InvalidRequest` for an address that cannot be served.
    """
    if not settings.peer_listen:
        yield
        return
    from ebbtide.rollout_worker.installs.peer_servicer import SERVICE, PeerServicer, add_to_server
    from ebbtide.rpc.server import Server

    at = server_settings(settings.peer_listen, settings.client, settings.token_keys)
    server = Server(at, [(add_to_server, PeerServicer(shelf), SERVICE)])
    with _as_peer_listen():
        await server.start()
    await server.set_serving(True)
    shelf.address = advertised(server.address, settings.peer_advertise)

    async def stop() -> None:
        shelf.address = ""
        changed()
        await server.stop(_GRACE_S)

    stopping = asyncio.create_task(_behind(leaving, stop), name="stop serving peers")
    try:
        yield
    finally:
        stopping.cancel()
        await asyncio.wait({stopping})
        await stop()


async def _behind(event: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
    await event.wait()
    await work()


def check_reachable(settings: WorkerSettings) -> None:
    """Raise `InvalidRequest` unless others can reach what the settings say about peers, by their names."""
    listen, advertise = settings.peer_listen, settings.peer_advertise
    if not listen:
        if advertise:
            raise InvalidRequest("is of no use to a worker that serves nobody: set peer_listen", field="peer_advertise")
        return
    if check_address(listen, field="peer_listen").startswith("unix:"):
        raise InvalidRequest("other machines reach no unix: socket: give host:port", field="peer_listen")
    host = (advertise or listen).rpartition(":")[0].strip("[]")
    if host in _ANYWHERE:
        raise InvalidRequest(f"is required: nobody reaches a worker at {host}", field="peer_advertise")
    check_peer(advertise or listen, field="peer_advertise" if advertise else "peer_listen")
    with _as_peer_listen():
        server_settings(listen, settings.client).credentials()


@contextmanager
def _as_peer_listen() -> Iterator[None]:
    """Name the field `peer_listen`, as this worker's settings do, in a server's error about `listen`."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != "listen":
            raise
        raise InvalidRequest(str(error).removeprefix("listen: "), field="peer_listen") from None


def server_settings(listen: str, client: ClientSecurity, token_keys: str = "") -> ServerSettings:
    """A worker serves with the shared secret and the certificate that it shows to others itself."""
    shared = {name: getattr(client, name) for name in Credentials.__struct_fields__}
    return ServerSettings(listen=listen, token_keys=token_keys, **shared)


def advertised(bound: str, advertise: str) -> str:
    """The address told to others of a server that is `bound`."""
    host, _, port = advertise.rpartition(":")
    return f"{host}:{bound.rpartition(':')[2]}" if port == "0" else advertise or bound
