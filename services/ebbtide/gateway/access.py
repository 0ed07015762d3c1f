"""Admits clients: who each is by its key, and how much they may ask for.

A key is a token as the services know it: the cluster's shared secret, which may do everything, or a signed token of one
role and perhaps one run.

Invariant: a request under way is counted once, from before its body is read until its answer has ended. Its body's
bytes are counted from their arrival until nothing holds them any more: then its prompts are encoded, or it has ended.
The counts are this process's alone.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.role_tokens import Claims, Keys, VerifiedTokens, is_signed
from ebbtide.auth.roles import Role
from ebbtide.auth.security import TokenCheck
from ebbtide.errors import NoCapacity, PermissionDenied, Unauthenticated
from ebbtide.gateway.prompt_threads import MOST_WAITING
from ebbtide.gateway.request import TextRequest
from ebbtide.types.ids import MAX_ID, check_session_name
from ebbtide.types.session import MAX_TURNS, KeyLimits, MeteredKey

#: Roles whose tokens may ask for text.
ASKS: Final = frozenset({Role.AGENT, Role.USER, Role.OPERATOR, Role.TRAINER})
#: Owner of what is asked for under the shared secret.
_SHARED: Final = "shared-secret"
_LONGEST: Final = 4096


class RequestLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what clients may ask for. More is refused, never cut."""

    body_bytes: Annotated[int, Meta(ge=1024, description="maximum bytes of a request's body")] = 8 << 20
    bodies_bytes: Annotated[
        int,
        Meta(ge=1024, description="maximum bytes of all bodies whose prompts are not encoded yet; at least body_bytes"),
    ] = 256 << 20
    bodies_bytes_per_key: Annotated[
        int, Meta(ge=1024, description="maximum bytes of such bodies of one key; at least body_bytes")
    ] = 128 << 20
    body_s: Annotated[float, Meta(gt=0, description="seconds within which a body must arrive")] = 30.0
    header_bytes: Annotated[int, Meta(ge=1024, description="maximum bytes of a request's line and headers")] = 64 << 10
    header_s: Annotated[float, Meta(gt=0, description="seconds within which line and headers must arrive")] = 15.0
    json_depth: Annotated[int, Meta(ge=4, le=500, description="maximum nesting of objects and lists in a body")] = 64
    json_containers: Annotated[int, Meta(ge=1 << 16, description="maximum objects and lists in a body")] = 100_000
    prompt_tokens: Annotated[
        int, Meta(ge=0, description="maximum tokens of a prompt; 0 allows what the model's context holds")
    ] = 0
    prompts_waiting: Annotated[
        int, Meta(ge=1, description="maximum prompts that wait for encoding; some of any further ones are refused")
    ] = MOST_WAITING
    messages: Annotated[int, Meta(ge=1, description="maximum messages of a chat")] = 4096
    tools: Annotated[int, Meta(ge=1, description="maximum tools of a chat")] = 256
    requests_per_key: Annotated[int, Meta(ge=1, description="maximum concurrent requests of one key")] = 1024
    requests: Annotated[int, Meta(ge=1, description="maximum concurrent requests in this gateway")] = 4096
    completions_per_key: Annotated[
        int, Meta(ge=128, description="maximum concurrent completions of one key; each is a stream")
    ] = 4096
    completions: Annotated[int, Meta(ge=128, description="maximum concurrent completions in this gateway")] = 16384
    request_s: Annotated[float, Meta(gt=0, description="maximum seconds of a request")] = 21600.0
    call_s: Annotated[float, Meta(gt=0, description="maximum seconds of a call that generates nothing")] = 120.0
    keep_alive_s: Annotated[
        float, Meta(gt=0, description="seconds without a token after which a stream sends a keep-alive")
    ] = 15.0

    @property
    def connections(self) -> int:
        """Connections at once: of requests under way, and those that are kept."""
        return 2 * self.requests + 64


class SessionLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on the sessions of one key. A session that is full can be ended, and goes on no more."""

    turns: Annotated[int, Meta(ge=1, le=MAX_TURNS, description="maximum turns of a session")] = 1024
    per_key: Annotated[int, Meta(ge=1, description="maximum open sessions of one key in one run")] = 10_000
    session_bytes: Annotated[
        int,
        Meta(ge=1 << 16, description="maximum bytes of a session here: 16 for each sampled token, 4 KiB for each turn"),
    ] = 64 << 20
    shelf_bytes: Annotated[
        int, Meta(ge=1 << 20, description="bytes of sessions to keep in memory; others are reloaded when needed")
    ] = 256 << 20


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
    """Clients of OpenAI's routes send the first header, clients of Anthropic's the second. A client that knows of no
    keys, such as TRL's, takes a password from a netrc file."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        bearer = bearer[7:].strip()
    elif bearer[:6].lower() == "basic ":
        bearer = _password(bearer[6:].strip())
    token = bearer or headers.get("x-api-key", "")
    return token if len(token) <= _LONGEST and token.isascii() else ""


def _password(credentials: str) -> str:
    """Of HTTP's basic scheme (RFC 7617); empty for what is none. The user's name says nothing here."""
    if len(credentials) > 2 * _LONGEST:
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode("ascii").partition(":")[2]
    except ValueError:
        return ""


class RequestSlots:
    """Counts requests under way, in all and by key."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.under_way = self.body_bytes = self.completions = 0
        self.under_way_of: Counter[str] = Counter()
        self.body_bytes_of: Counter[str] = Counter()
        self.completions_of: Counter[str] = Counter()

    @contextmanager
    def taken(self, key: ClientKey) -> "Iterator[RequestSlot]":
        """Count one request inside the block. Raises `NoCapacity` if there are too many already."""
        owner, most = key.owner, self.limits.requests_per_key
        if self.under_way >= self.limits.requests:
            raise NoCapacity(f"this gateway has {self.under_way} requests under way, and takes no more; try again")
        if self.under_way_of[owner] >= most:
            raise NoCapacity(f"{owner} has {most} requests under way, the most that one key may have; wait for some")
        self.under_way_of[owner] += 1
        self.under_way += 1
        slot = RequestSlot(self, owner)
        try:
            yield slot
        finally:
            slot.release_body()
            self.completions -= slot.completions
            self.completions_of[owner] -= slot.completions
            self.under_way -= 1
            self.under_way_of[owner] -= 1
            if not self.under_way_of[owner]:
                del self.under_way_of[owner], self.body_bytes_of[owner], self.completions_of[owner]


class RequestSlot:
    """The place of one request under way."""

    def __init__(self, slots: RequestSlots, owner: str) -> None:
        self._slots, self._owner = slots, owner
        self.body_bytes = self.completions = 0

    def add_completions(self, count: int) -> None:
        """Count the request's completions. Raises `NoCapacity`, and counts none, if the key's or all are too many."""
        slots, owner, most = self._slots, self._owner, self._slots.limits.completions_per_key
        if slots.completions_of[owner] + count > most:
            raise NoCapacity(f"{owner} has {most} completions under way, the most that one key may have; wait for some")
        if slots.completions + count > slots.limits.completions:
            text = f"this gateway has {slots.completions} completions under way, and takes no more; try again"
            raise NoCapacity(text)
        slots.completions_of[owner] += count
        slots.completions += count
        self.completions += count

    def add_body(self, count: int) -> None:
        """Count bytes that arrived. Raises `NoCapacity`, and counts none, if the key's or all bodies have too many."""
        slots, owner, limits = self._slots, self._owner, self._slots.limits
        most = max(limits.bodies_bytes_per_key, limits.body_bytes)
        if slots.body_bytes_of[owner] + count > most:
            raise NoCapacity(f"{owner} has bodies of {most} bytes that are read, the most of one key; try again")
        most = max(limits.bodies_bytes, limits.body_bytes)
        if slots.body_bytes + count > most:
            raise NoCapacity(f"bodies of {most} bytes are read now, the most that fit; try again")
        slots.body_bytes_of[owner] += count
        slots.body_bytes += count
        self.body_bytes += count

    def release_body(self) -> None:
        """Count the body no more. A repeat does nothing."""
        self._slots.body_bytes_of[self._owner] -= self.body_bytes
        self._slots.body_bytes -= self.body_bytes
        self.body_bytes = 0
