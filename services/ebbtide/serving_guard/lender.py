"""Lends a device, whoever owns it: what all modes of the guard share.

A mode brings a keeper, which writes into the pages what engines may do, and an issuer, which says in grants what memory
they may use. The socket where workers connect and the enforcer are here, and the order in which all ends.
"""

from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from ebbtide.auth.security import ServerSettings
from ebbtide.grants import socket_path
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.enforcer import Enforcer
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.loans.servicer import GRANTS, GrantServicer
from ebbtide.rpc.server import Server, Service
from ebbtide.runtime import Shutdown
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.telemetry import rpc_observer
from ebbtide.types.grants import GuardStatus
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server

#: Streams end at once, with `Draining`; no other call is worth waiting for.
_GRACE_S: Final = 0.5


class Keeper(Protocol):
    """Keeps in the pages what engines may do. `granting`: whether that is anything now. `step_s`: the longest that a
    rollout step takes, as far as known."""

    @property
    def granting(self) -> bool: ...

    @property
    def step_s(self) -> float: ...

    def review(self) -> None:
        """Decide now."""
        ...

    def close(self) -> None:
        """Take everything back, for good."""
        ...


class Lender:
    """A mode is a lender with its own parts. It is started once."""

    def __init__(
        self,
        settings: GuardSettings,
        borrowers: BorrowerTable,
        keeper: Keeper,
        issuer: GrantIssuer,
        status: Callable[[], GuardStatus],
        more: Iterable[Service] = (),
    ) -> None:
        """`status`: what `WatchGuard` tells. `more`: services besides Grants on the same socket."""
        self._settings, self._borrowers, self._keeper = settings, borrowers, keeper
        self._enforcer = Enforcer(
            borrowers,
            yield_s=settings.yield_ms / 1000,
            kill_s=settings.kill_s,
            most=settings.max_stops,
            predicted_s=lambda: keeper.step_s,
            granting=lambda: keeper.granting,
        )
        grants = GrantServicer(GrantStream(borrowers, issuer), status)
        self.services: list[Service] = [(add_GrantsServicer_to_server, grants, GRANTS), *more]
        socket = socket_path(Path(settings.grant_dir)).absolute()
        self._server = Server(ServerSettings.at(f"unix:{socket}"), self.services, observe=rpc_observer(), private=True)

    @property
    def address(self) -> str:
        """Where those connect whom the mode serves first."""
        return self._server.address

    async def start(self, shutdown: Shutdown) -> None:
        self._keeper.review()
        await self._server.start()
        for name, work in self._work().items():
            shutdown.spawn(work, name)
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """End grants first: the owner has its device to itself while no guard runs."""
        self._stop_lending()
        self._enforcer.close()
        await self._server.stop(_GRACE_S)

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs all the time, by name."""
        return {"enforcer": self._enforcer.run()}

    def _stop_lending(self) -> None:
        self._borrowers.close()
        self._keeper.close()
