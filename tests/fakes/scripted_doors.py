"""Makes what a gateway's routes share, over scripted rollouts."""

from typing import Any, cast

from ebbtide.gateway.access import KeyRing, RequestLimits, RequestSlots, SessionLimits
from ebbtide.gateway.routes.gateway_doors import AppState
from ebbtide.gateway.runs import RunCatalog, RunDirectory
from ebbtide.gateway.sessions.player import SessionCache
from tests.fakes.scripted_rollouts import ScriptedCatalog

_SESSIONS = SessionLimits()


def scripted_directory(catalog: ScriptedCatalog, **options: Any) -> RunDirectory:
    return RunDirectory(cast("RunCatalog", catalog), **options)


def scripted_doors(
    catalog: ScriptedCatalog, keys: KeyRing, limits: RequestLimits, sessions: SessionLimits = _SESSIONS
) -> AppState:
    """The doors of a gateway that is not leaving."""
    return AppState(
        keys=keys,
        limits=limits,
        slots=RequestSlots(limits),
        directory=scripted_directory(catalog, max_prompt_tokens=limits.prompt_tokens),
        session_limits=sessions,
        shelf=SessionCache(sessions.shelf_bytes),
        is_leaving=lambda: False,
    )
