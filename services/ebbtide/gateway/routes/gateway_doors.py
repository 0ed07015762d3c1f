"""Holds what all routes share."""

from collections.abc import Callable

from msgspec import Struct

from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import Unavailable
from ebbtide.gateway.access import ClientKey, KeyRing, RequestLimits, RequestSlots, SessionLimits
from ebbtide.gateway.player import RequestPlayer
from ebbtide.gateway.routes.client_ids import REQUEST_ID
from ebbtide.gateway.runs import RunDirectory
from ebbtide.gateway.sessions.player import SessionCache, SessionPlayer


class AppState(Struct, frozen=True, kw_only=True):
    """The parts of the gateway that a route needs."""

    keys: KeyRing
    limits: RequestLimits
    slots: RequestSlots
    directory: RunDirectory
    session_limits: SessionLimits
    shelf: SessionCache
    request_id_header: str = REQUEST_ID  # by which clients come back
    is_leaving: Callable[[], bool]  # whether the gateway takes no more requests

    def sessions_of(self, lease: GatewayLease, player: RequestPlayer, key: ClientKey) -> SessionPlayer:
        """The sessions of a key on one run."""
        return SessionPlayer(self.shelf, lease, player, self.session_limits, key.sessions_of)

    def check_open(self) -> None:
        """Raise `Unavailable` once the gateway shuts down."""
        if self.is_leaving():
            raise Unavailable("this gateway is shutting down; try again, another one answers")
