"""Holds what all routes share."""

from collections.abc import Callable

from msgspec import Struct

from ebbtide.errors import Unavailable
from ebbtide.gateway.access.client_key import KeyRing
from ebbtide.gateway.access.request_limits import RequestLimits, RequestSlots
from ebbtide.gateway.runs.run_directory import RunDirectory
from ebbtide.gateway.runs.run_pauses import RunPauses


class GatewayDoors(Struct, frozen=True, kw_only=True):
    """The parts of the gateway that a route needs."""

    keys: KeyRing
    limits: RequestLimits
    slots: RequestSlots
    directory: RunDirectory
    pauses: RunPauses
    is_leaving: Callable[[], bool]  # whether the gateway takes no more requests

    def check_open(self) -> None:
        """Raise `Unavailable` once the gateway shuts down."""
        if self.is_leaving():
            raise Unavailable("this gateway is shutting down; try again, another one answers")
