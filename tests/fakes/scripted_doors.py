"""Makes what a gateway's routes share, over scripted rollouts."""

from typing import Any, cast

from ebbtide.gateway.access.client_key import KeyRing
from ebbtide.gateway.access.request_limits import RequestLimits, RequestSlots
from ebbtide.gateway.episodes.session_limits import SessionLimits
from ebbtide.gateway.episodes.session_shelf import SessionShelf
from ebbtide.gateway.routes.gateway_doors import GatewayDoors
from ebbtide.gateway.runs.run_catalog import RunCatalog
from ebbtide.gateway.runs.run_directory import RunDirectory
from tests.fakes.scripted_rollouts import ScriptedCatalog

_SESSIONS = SessionLimits()


def scripted_directory(catalog: ScriptedCatalog, **options: Any) -> RunDirectory:
    return RunDirectory(cast("RunCatalog", catalog), **options)


def scripted_doors(
    catalog: ScriptedCatalog, keys: KeyRing, limits: RequestLimits, sessions: SessionLimits = _SESSIONS
) -> GatewayDoors:
    """The doors of a gateway that is not leaving."""
    return GatewayDoors(
        keys=keys,
        limits=limits,
        slots=RequestSlots(limits),
        directory=scripted_directory(catalog, max_prompt_tokens=limits.prompt_tokens),
        session_limits=sessions,
        shelf=SessionShelf(sessions.shelf_bytes),
        is_leaving=lambda: False,
    )
