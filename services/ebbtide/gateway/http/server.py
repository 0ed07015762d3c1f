"""Serves the application over HTTP/1.1 by uvicorn, within bounds that uvicorn lacks.

They bound what a connection may send before its request is read, and behind it; and how many connections there are:
beyond them the one that is idle for longest is closed.

Invariant: `stop` closes the listening socket first, then lets requests under way finish within its time. It returns
once those that it cancelled have ended, too. On a connection at most one timer runs: for a head while no answer is
under way, or for the rest of a body whose request was answered before it had arrived. Trailers are never headers of a
request.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.access import RequestLimits
from ebbtide.gateway.http.text_route import CANCEL_S
from ebbtide.gateway.settings import GatewaySettings, TlsSettings
from ebbtide.runtime import allow_files

#: A kept connection without a request is closed after so long; clients' pools keep them for about a minute.
_KEPT_S: Final = 75
#: Files beside connections of clients: those of services, templates and models.
_OTHER_FILES: Final = 1024
#: Requests that are cancelled at the end get so long: to follow their submit, then to cancel their rollouts.
_ENDING_S: Final = 2 * CANCEL_S


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process's own runtime handles them."""
        yield


class HttpServer:
    """Listens from `start` to `stop`."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._settings = settings
        self._config = uvicorn.Config(
            app,
            http=bounded_protocol(settings.limits),
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEPT_S,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            # The protocol bounds connections: these are some more, until those that it closed are gone.
            limit_concurrency=2 * settings.limits.connections,
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Raises `InvalidRequest` naming `listen` if the address cannot be had."""
        listening = _bound(self._settings.listen)
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._config.load()
        allow_files(2 * self._settings.limits.connections + _OTHER_FILES)
        if self._settings.door.tls_cert:
            door = self._settings.door
            fresh = ReloadedFiles((door.tls_cert, door.tls_key, door.client_ca), lambda: _context(door))
            self._config.ssl = _context(door)
            # A context in use would keep half of a pair that does not match.
            self._config.ssl.sni_callback = lambda connection, *_: setattr(connection, "context", fresh.get())
        self._server = _Server(self._config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            await asyncio.wait({self._serving}, timeout=0.01)
            if self._serving.done():
                self._serving.result()
                raise InvalidRequest(f"{self._settings.listen} cannot be served", field="listen")

    async def ended(self) -> None:
        """Return, or raise, when the server has ended."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            if cancelled := list(self._server.server_state.tasks):  # uvicorn waits for none of those that it cancels
                await asyncio.wait(cancelled, timeout=_ENDING_S)


def _context(door: TlsSettings) -> ssl.SSLContext:
    """Raises `InvalidRequest` naming the file that is wrong, or does not match the other one."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(door.tls_cert, door.tls_key)
        if door.client_ca:
            context.load_verify_locations(door.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest(str(error), field="door.tls_cert") from None
    return context


def _bound(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host.strip("[]"), int(port)))
        made.listen(2048)
    except OSError as error:
        made.close()
        raise InvalidRequest(f"cannot bind {listen} ({error.strerror})", field="listen") from None
    made.setblocking(False)
    return made


_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections that send too much, or too slowly, outside of a body that is being read."""

    limits: ClassVar[RequestLimits]
    idle: "ClassVar[dict[BoundedProtocol, None]]"  # connections of the server without a request, the longest idle first
    _reads_head = True  # no: a body is arriving
    _head_bytes = 0
    _framing_bytes = 0  # behind the last part of a body: chunk extensions and trailers
    _discarded_bytes = 0  # of a body, behind the answer to its request
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._time(self.limits.header_s)
        self.idle[self] = None
        if len(self.connections) > self.limits.connections:
            oldest = next(iter(self.idle))  # at least this one is idle
            del self.idle[oldest]
            oldest.transport.abort()  # a peer that reads nothing would keep a closing one open

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._head_bytes += len(data)
            # A client that sends ahead does not shorten the answer that it is reading.
            if self._timer is None and self._is_answered:
                self._time(self.limits.header_s)
        else:
            self._framing_bytes += len(data)
            self._discarded_bytes += len(data) if self._is_answered else 0
        super().data_received(data)
        if not self.transport.is_closing():
            self._check_bytes()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_timer()
        self.idle.pop(self, None)
        self._reads_head, self._framing_bytes, self._discarded_bytes = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0
        if self._is_answered:  # uvicorn's timer of a kept connection ended with the body's next part
            self._time(self.limits.header_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self._is_answered:
            return
        self.idle[self] = None
        if not self._reads_head:
            # To close at once could reset the connection before the client has read its answer.
            self._time(self.limits.body_s)
        elif self._head_bytes:
            self._time(self.limits.header_s)

    @property
    def _is_answered(self) -> bool:
        """Whether every request whose head has arrived has its whole answer."""
        return self.cycle is None or self.cycle.response_complete

    def _check_bytes(self) -> None:
        """If the head is complete by now, a part of the data was its body."""
        if self._reads_head and self._head_bytes > self.limits.header_bytes:
            if self._is_answered:  # else this would stand in the middle of an answer
                self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif not self._reads_head and (
            self._framing_bytes > self.limits.header_bytes or self._discarded_bytes > self.limits.body_bytes
        ):
            self.transport.close()

    def _time(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self._late)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def bounded_protocol(limits: RequestLimits) -> type[BoundedProtocol]:
    """The protocol with these limits: uvicorn takes a class."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "idle": {}})
