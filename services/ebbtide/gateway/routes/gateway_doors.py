"""Holds what all routes share."""

from collections.abc import Callable

from msgspec import Struct

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
