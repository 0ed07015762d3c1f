"""Makes what a gateway's routes share, over scripted rollouts."""

from typing import Any, cast

from ebbtide.gateway.access import KeyRing, RequestLimits, RequestSlots, SessionLimits
from ebbtide.gateway.http.route import AppState
from ebbtide.gateway.runs import RunCatalog, RunDirectory
from ebbtide.gateway.sessions.turn_player import SessionCache
from tests.fakes.scripted_rollouts import ScriptedCatalog

_SESSIONS = SessionLimits()


def scripted_directory(catalog: ScriptedCatalog, **options: Any) -> RunDirectory:
    return RunDirectory(cast("RunCatalog", catalog), **options)


def scripted_app_state(
    catalog: ScriptedCatalog, keys: KeyRing, limits: RequestLimits, sessions: SessionLimits = _SESSIONS
) -> AppState:
    """The state of a gateway that is not leaving."""
    return AppState(
        keys=keys,
        limits=limits,
        slots=RequestSlots(limits),
        directory=scripted_directory(catalog, max_prompt_tokens=limits.prompt_tokens),
        session_limits=sessions,
        cache=SessionCache(sessions.shelf_bytes),
        is_leaving=lambda: False,
    )
