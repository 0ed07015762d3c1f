"""Keeps the roles of the present call's caller, for its servicer.

Admission sets them before the servicer begins. Each call is its own task, so calls do not see each other's roles.
"""

from contextvars import ContextVar
from typing import Final

from ebbtide.auth.roles import AMONG_PEERS, Role

#: None: the caller came without a role, and may do everything.
_ROLES: Final[ContextVar[frozenset[Role] | None]] = ContextVar("caller_roles", default=None)


def note_roles(roles: frozenset[Role] | None) -> None:
    """Set the roles of the caller of this task's call."""
    _ROLES.set(roles)


def is_among_peers() -> bool:
    """Whether workers may fetch from the caller, and show it their tokens."""
    roles = _ROLES.get()
    return roles is None or not roles.isdisjoint(AMONG_PEERS)
