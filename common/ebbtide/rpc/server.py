"""Runs a service's gRPC server, with authentication, limits, health and reflection.

Invariant: it accepts calls from `start` to `stop`. Its health says SERVING only between `set_serving(True)` and `stop`,
for the whole server ("") and for each of its services alike. A restart loses nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ebbtide.auth.admission import Anyone
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.rpc.channel import check_address
from ebbtide.rpc.channel_options import KEEPALIVE_S, server_options
from ebbtide.rpc.gate import Gate, Observer

#: The generated function that registers a servicer, the servicer, and the service's full name.
Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]
_STATUS: Final = health_pb2.HealthCheckResponse


class Server:
    """`services` as in [(add_X_to_server, servicer, "pkg.X")]. `window_bytes`: see `server_options`; `calls_per_user`:
    see `CallerTurns`.

    `private`: the address is a unix socket in a folder that only this user can enter, so callers need no token. Raises
    `InvalidRequest` for unsafe settings: no way to authenticate callers, or no TLS off the loopback.
    """

    def __init__(
        self,
        settings: ServerSettings,
        services: Sequence[Service],
        *,
        observe: Observer | None = None,
        keepalive_s: float = KEEPALIVE_S,
        window_bytes: int = 0,
        calls_per_user: int = 0,
        private: bool = False,
    ) -> None:
        self._listen = check_address(settings.listen, field="listen")
        if private and not self._listen.startswith("unix:"):
            raise InvalidRequest("only a unix socket needs no token", field="listen")
        self._credentials = settings.credentials()
        admission = Anyone() if private else settings.admission()
        self._gate = gate = Gate(
            admission, max_unary_s=settings.max_unary_s, calls_per_user=calls_per_user, observe=observe
        )
        options = server_options(keepalive_s, max_streams=settings.max_streams, window_bytes=window_bytes)
        self._server = grpc.aio.server(interceptors=[gate], options=options)
        self._names = [name for _, _, name in services]
        for add, servicer, _ in services:
            add(servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = 0

    @property
    def address(self) -> str:
        """The address for clients; known after `start`."""
        return self._listen if self._listen.startswith("unix:") else f"{self._listen.rpartition(':')[0]}:{self.port}"

    @property
    def closed(self) -> EbbtideError | None:
        """The error that answers every call, except health checks; None: calls are served."""
        return self._gate.closed

    @closed.setter
    def closed(self, why: EbbtideError | None) -> None:
        self._gate.closed = why

    async def start(self) -> None:
        """Bind, and accept calls as NOT_SERVING. Raises `InvalidRequest` naming `listen` if the address is taken."""
        await self.set_serving(False)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._listen)
            else:
                self.port = self._server.add_secure_port(self._listen, self._credentials)
        except RuntimeError:
            raise InvalidRequest(f"cannot bind {self._listen}: is it in use?", field="listen") from None
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace: float = 5.0) -> None:
        """Report NOT_SERVING from now on, end streams as `Draining`, and cancel other calls after `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        self._gate.end_streams()
        await self._server.stop(grace)
