"""What a servicer may ask of its caller: the roles by which the call was let in.

Set by the admission before the servicer begins; each call is a task of its own, so that none sees another's.
"""

from contextvars import ContextVar
from typing import Final

from ebbtide.auth.roles import AMONG_PEERS, Role

#: None: of no role, who may do everything.
_ROLES: Final[ContextVar[frozenset[Role] | None]] = ContextVar("caller_roles", default=None)


def note_roles(roles: frozenset[Role] | None) -> None:
    """The caller of this task's call has come with these."""
    _ROLES.set(roles)


def is_among_peers() -> bool:
    """Whether workers may be sent to the caller, and show it their tokens."""
    roles = _ROLES.get()
    return roles is None or not roles.isdisjoint(AMONG_PEERS)
