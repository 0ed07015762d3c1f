"""Authenticates the client of each request by its key.

A key is a token as the services know it: the cluster's shared secret, which may do everything, or a signed token of one
role and perhaps one run.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.auth.role_tokens import Claims, Keys, is_signed
from ebbtide.auth.roles import Role
from ebbtide.auth.security import TokenCheck
from ebbtide.auth.verified_tokens import VerifiedTokens
from ebbtide.errors import PermissionDenied, Unauthenticated
from ebbtide.gateway.request import TextRequest
from ebbtide.types.ids import MAX_ID, check_session_name
from ebbtide.types.key_usage import KeyLimits, MeteredKey

#: Roles whose tokens may ask for text.
ASKS: Final = frozenset({Role.AGENT, Role.USER, Role.OPERATOR, Role.TRAINER})
#: Owner of what is asked for under the shared secret.
_SHARED: Final = "shared-secret"
_LONGEST: Final = 4096


class ClientKey(Struct, frozen=True, kw_only=True):
    """Who asks. Requests belong to `owner`, sessions to `sessions_of`."""

    owner: str  # an id: names, roles and the shared secret have spaces of their own
    sessions_of: str  # an id: all keys of a name have the same sessions, so that one key ends what another one plays
    only_plays: bool = False  # it may neither read nor end sessions, nor ask before others
    session_id: str = ""  # the client's name of the only session that it may play; empty: any
    run_id: str = ""  # the only run that it is for; empty: every run
    metered: MeteredKey | None = None  # None: it has no limits

    def admits(self, run_id: str) -> bool:
        return self.run_id in ("", run_id)

    def admitted(self, request: TextRequest) -> TextRequest:
        """The request as the key may ask it. Raises `PermissionDenied` for another session, or to go before others, and
        `InvalidRequest` under a key whose session could stand in no path.
        """
        if self.only_plays and request.priority < 0:
            raise PermissionDenied("priority: a key of role agent goes before no other; give 0 or more")
        if not self.session_id:
            return request
        if request.session_id not in ("", self.session_id):
            raise PermissionDenied(f"X-Session-ID: the key is for session {self.session_id[:100]!r} alone")
        if request.group_id:
            raise PermissionDenied("X-Group-ID: the key is for one session, which its owner opens in its group")
        return replace(request, session_id=check_session_name(self.session_id, field="X-Session-ID"))

    def check_ends(self) -> None:
        """Raise `PermissionDenied` for a key that may not read or end sessions: an agent would reward itself."""
        if self.only_plays:
            raise PermissionDenied(
                "a key of role agent plays sessions, which opens new ones, and neither lists, reads nor ends them; "
                "take a key of role user, trainer or operator, and of the same name"
            )


class KeyRing:
    """Knows the keys. `shared` checks the cluster's secret, if there is one; `keys` verify signed tokens."""

    def __init__(self, shared: ReloadedFiles[TokenCheck | None] | None, keys: ReloadedFiles[Keys] | None) -> None:
        self._shared, self._keys = shared, keys
        self._verified = VerifiedTokens()

    def admit(self, headers: Mapping[str, str]) -> ClientKey:
        """The key of a request. Raises `Unauthenticated`, and `PermissionDenied` for a role that may not ask."""
        token = _token(headers)
        secret = self._shared.get() if self._shared else None
        if secret is not None and secret(f"Bearer {token}"):
            return ClientKey(owner=_SHARED, sessions_of=_SHARED)
        if self._keys is None or not is_signed(token):
            raise Unauthenticated("the key is missing or wrong; send a token as Authorization: Bearer, or as x-api-key")
        claims = self._verified.claims(token, self._keys.get())
        if claims.role not in ASKS:
            allowed = " or ".join(sorted(ASKS))
            raise PermissionDenied(
                f"the key is a token of role {claims.role}; the gateway takes keys of role {allowed}"
            )
        owner = _owner(claims, token)
        return ClientKey(
            owner=owner,
            sessions_of=_sessions_of(claims, owner),
            only_plays=claims.role is Role.AGENT,
            session_id=claims.session_id,
            run_id=claims.run_id,
            metered=MeteredKey(owner=owner, limits=claims.limits) if claims.limits != KeyLimits() else None,
        )


def _owner(claims: Claims, token: str) -> str:
    """Whom a token's requests belong to: all tokens of its role and name, or it alone if it has no name."""
    if not claims.name:
        # The signed part alone: however the signature is spelled, the token is the same.
        return f"token.{claims.role}.{_digest(token.rpartition('.')[0])}"
    owner = f"name.{claims.role}.{claims.name}"
    return owner if len(owner) <= MAX_ID else f"long-name.{claims.role}.{_digest(claims.name)}"


def _sessions_of(claims: Claims, owner: str) -> str:
    """Whom the sessions of a token belong to: all tokens of its name, or it alone if it has no name."""
    if not claims.name:
        return owner
    named = f"named.{claims.name}"
    return named if len(named) <= MAX_ID else f"long-named.{_digest(claims.name)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _token(headers: Mapping[str, str]) -> str:
    """Clients of OpenAI's routes send the first header, clients of Anthropic's the second."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        bearer = bearer[7:].strip()
    token = bearer or headers.get("x-api-key", "")
    return token if len(token) <= _LONGEST and token.isascii() else ""
