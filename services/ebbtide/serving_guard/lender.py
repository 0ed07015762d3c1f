"""Lends a device, whoever owns it: what all modes of the guard share.

A mode brings a keeper, which writes into the pages what engines may do, and an issuer, which says in grants what memory
they may use. Here are the socket where workers connect, and the enforcer.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from ebbtide.auth.security import ServerSettings
from ebbtide.grants import socket_path
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.enforcer import Enforcer
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.loans.servicer import GRANTS, GrantServicer
from ebbtide.rpc.server import Server, Service
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.telemetry import rpc_observer
from ebbtide.types.grants import GuardStatus
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server

#: Streams end at once, with `Draining`; no other call is worth waiting for.
_GRACE_S: Final = 0.5


class Keeper(Protocol):
    """Keeps in the pages what engines may do now."""

    @property
    def granting(self) -> bool:
        """Whether engines may compute."""
        ...

    @property
    def step_s(self) -> float:
        """The longest that a rollout step takes, as far as known."""
        ...

    def review(self) -> None:
        """Decide now."""
        ...

    def close(self) -> None:
        """Take everything back, for good."""
        ...


class Lender:
    """`status`: what `WatchGuard` tells. `more`: services besides Grants on the same socket. It is started once."""

    def __init__(
        self,
        settings: GuardSettings,
        borrowers: BorrowerTable,
        keeper: Keeper,
        issuer: GrantIssuer,
        status: Callable[[], GuardStatus],
        more: Iterable[Service] = (),
    ) -> None:
        self._borrowers, self._keeper = borrowers, keeper
        self.enforcer = Enforcer(
            borrowers,
            yield_s=settings.yield_ms / 1000,
            kill_s=settings.kill_s,
            most=settings.max_stops,
            predicted_s=lambda: keeper.step_s,
            granting=lambda: keeper.granting,
        )
        grants = GrantServicer(GrantStream(borrowers, issuer), status)
        self.services: list[Service] = [(add_GrantsServicer_to_server, grants, GRANTS), *more]
        self.address = f"unix:{socket_path(Path(settings.grant_dir)).absolute()}"

    async def start(self) -> None:
        """Take over the device and let workers connect. The caller runs keeper and enforcer."""
        self._keeper.review()
        self._server = Server(ServerSettings.at(self.address), self.services, observe=rpc_observer(), private=True)
        await self._server.start()
        await self._server.set_serving(True)

    def close(self) -> None:
        """Lend nothing any more; workers stay connected, and see it."""
        self._borrowers.close()
        self._keeper.close()

    async def stop(self) -> None:
        """End grants first: the owner has its device to itself while no guard runs."""
        self.close()
        self.enforcer.close()
        await self._server.stop(_GRACE_S)
