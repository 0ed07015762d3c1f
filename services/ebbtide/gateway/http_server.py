"""Serves the application over HTTP/1.1 by uvicorn.

Invariant: `stop` closes the listening socket first, then lets requests under way finish within its time. It returns
once those that it cancelled have ended, too.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.bounded_protocol import bounded_protocol
from ebbtide.gateway.routes.text_route import CANCEL_S
from ebbtide.gateway.settings import DoorSettings, GatewaySettings
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


def _context(door: DoorSettings) -> ssl.SSLContext:
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
