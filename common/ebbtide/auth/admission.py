"""Authenticates the caller of every call and decides whether the call is allowed.

A caller shows a token: the cluster's shared secret, which stands for every role, or a signed token, which stands for
one role and perhaps one run. If clients show certificates, token and certificate must both permit the call. The check
happens when a call begins; a stream continues when its token expires.

A message is about the runs in its fields named `run_id`, at any depth. The fields are found by the contracts'
descriptors, once per type: a new RPC needs no change here.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from ebbtide.auth.credential_files import ReloadedFiles, read_file, roles_of_peer
from ebbtide.auth.role_tokens import Claims, Keys, VerifiedTokens, is_signed, public_keys
from ebbtide.auth.roles import AMONG_PEERS, Role, is_open, may_claim, permitted, told
from ebbtide.auth.security import AUTHORIZATION, ServerSettings, TokenCheck
from ebbtide.errors import InvalidRequest, PermissionDenied, Unauthenticated

_RUN: Final = "run_id"


def runs_named(message: Message) -> Iterator[str]:
    """The run ids that are set in a message, at any depth."""
    for field, value in message.ListFields():
        if not _leads_to_run(field):
            continue
        if field.message_type is None:
            yield value
        elif isinstance(value, Message):
            yield from runs_named(value)
        else:
            for one in value.values() if field.message_type.GetOptions().map_entry else value:
                yield from runs_named(one)


@cache
def can_name_run(method: str) -> bool:
    """Whether requests of a method (`/package.Service/Method`) have a field for a run's id."""
    service, _, name = method.strip("/").partition("/")
    try:
        return _has_run(Default().FindMethodByName(f"{service}.{name}").input_type, frozenset())
    except KeyError:
        return False


class OfOneRun:
    """The requests of a caller whose token is for one run. Raises `PermissionDenied` for a message about another run,
    and if the first message names no run.
    """

    def __init__(self, requests: AsyncIterator[Message], run_id: str) -> None:
        self._requests, self._run_id, self._first = aiter(requests), run_id, True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await anext(self._requests)
        check_run(message, self._run_id, needed=self._first)
        self._first = False
        return message


def check_run(message: Message, run_id: str, *, needed: bool = True) -> None:
    """Raise `PermissionDenied` for a message about another run and, if `needed`, for a message about no run."""
    found = set(runs_named(message))
    if found - {run_id}:
        raise PermissionDenied("the token is for another run than the call; use a token for that run, or for every run")
    if needed and not found:
        raise no_run_named()


def no_run_named() -> PermissionDenied:
    return PermissionDenied(
        "the token is for one run, and the call names none: name the run, or use a token that is not bound to one"
    )


@cache
def _leads_to_run(field: FieldDescriptor) -> bool:
    if field.message_type is None:
        return field.name == _RUN
    return _has_run(field.message_type, frozenset())


def _has_run(kind: Descriptor, above: frozenset[Any]) -> bool:
    if kind.full_name in above:
        return False
    return any(
        field.name == _RUN if field.message_type is None else _has_run(field.message_type, above | {kind.full_name})
        for field in kind.fields
    )


Metadata = Iterable[tuple[str, str | bytes]] | None
_SCHEME: Final = "Bearer "
#: Roles of the present call's caller; None: the caller came without a role, and may do everything. Each call is a task
#: of its own, so calls do not see each other's roles.
_CALLER_ROLES: Final[ContextVar[frozenset[Role] | None]] = ContextVar("caller_roles", default=None)


#: Name in the token of the present call's caller; empty if it has none.
_CALLER_NAME: Final[ContextVar[str]] = ContextVar("caller_name", default="")


def caller_name() -> str:
    """The name of the present call's caller, as its token has it."""
    return _CALLER_NAME.get()


def is_among_peers() -> bool:
    """Whether workers may fetch from the present call's caller, and show it their tokens."""
    roles = _CALLER_ROLES.get()
    return roles is None or not roles.isdisjoint(AMONG_PEERS)


def check_claim(lease_role: str) -> None:
    """Raise `PermissionDenied` if the present call's caller may not claim a lease of this role."""
    roles = _CALLER_ROLES.get()
    if roles is not None and not may_claim(lease_role, roles):
        raise PermissionDenied(f"the token is for role {_listed(roles)}, which takes no {lease_role} lease")


class Admission:
    """`shared` checks the cluster's secret, if there is one; `keys` verify signed tokens; with `certificates`, clients
    show certificates.
    """

    def __init__(
        self,
        shared: ReloadedFiles[TokenCheck | None] | None,
        keys: ReloadedFiles[Keys] | None = None,
        *,
        certificates: bool = False,
    ) -> None:
        self._shared, self._keys, self._certificates = shared, keys, certificates
        self._verified = VerifiedTokens()

    def admit(self, method: str, metadata: Metadata) -> None:
        """Check what is known before the request is read. Raises `Unauthenticated` or `PermissionDenied`."""
        claims = self._claims(metadata)
        if claims is None:
            return
        if not permitted(method, (claims.role,)):
            raise _not_for(method, "token", (claims.role,))
        if claims.run_id and not is_open(method) and not can_name_run(method):
            raise no_run_named()

    def checked(self, method: str, request: Any, context: Any) -> Any:
        """The request (or iterator) of an admitted call. Raises `PermissionDenied` if the client's certificate is for
        another role than the call, or any message of the request is about another run than the token.
        """
        if self._keys is None and not self._certificates:
            _CALLER_ROLES.set(None)
            _CALLER_NAME.set("")
            return request
        claims = self._claims(context.invocation_metadata())
        roles = roles_of_peer(context.auth_context()) if self._certificates else None
        _check_certificate(method, claims, roles)
        _CALLER_ROLES.set(roles if claims is None else frozenset({claims.role}))
        _CALLER_NAME.set(claims.name if claims else "")
        if claims is None or not claims.run_id or is_open(method):
            return request
        if hasattr(request, "__aiter__"):
            return OfOneRun(request, claims.run_id)
        check_run(request, claims.run_id)
        return request

    def _claims(self, metadata: Metadata) -> Claims | None:
        """The claims of the caller's signed token; None for the shared secret. Raises `Unauthenticated`."""
        value = next((value for key, value in metadata or () if key == AUTHORIZATION), "")
        secret = self._shared.get() if self._shared else None
        if secret is not None and secret(value):
            return None
        text = value if isinstance(value, str) else value.decode(errors="replace")
        token = text.removeprefix(_SCHEME)
        if self._keys is None or not text.startswith(_SCHEME) or not is_signed(token):
            raise Unauthenticated("the token is missing or wrong; set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE")
        return self._verified.claims(token, self._keys.get())


def _check_certificate(method: str, claims: Claims | None, roles: frozenset[Role] | None) -> None:
    if roles is None:
        return
    if claims is not None and claims.role not in roles:
        raise PermissionDenied(
            f"the token is for role {claims.role}, the certificate for {_listed(roles)}; use a pair of one role"
        )
    if claims is None and not permitted(method, roles):
        raise _not_for(method, "certificate", roles)


def _not_for(method: str, what: str, roles: Iterable[Role]) -> PermissionDenied:
    name = method.rpartition("/")[2]
    return PermissionDenied(
        f"the {what} is for role {_listed(roles)}, and {name} is for {told(method)}; use one of those"
    )


def _listed(roles: Iterable[Role]) -> str:
    return " or ".join(sorted(roles)) or "none known here"


class Anyone:
    """Replaces `Admission` on a socket that only this user can open: the folder's mode is the check."""

    def admit(self, method: str, metadata: Metadata) -> None: ...

    def checked(self, _method: str, request: Any, _context: Any) -> Any:
        _CALLER_ROLES.set(None)
        return request


def admission_of(settings: ServerSettings) -> Admission:
    """The check before every call of a server with these settings. Raises `InvalidRequest` for settings that admit
    nobody, or the wrong callers.
    """
    if not settings.token_keys and not settings.present_token():
        raise InvalidRequest("is required: set EBBTIDE_TOKEN_FILE, or EBBTIDE_TOKEN_KEYS", field="token")
    shared = ReloadedFiles((settings.token_file,), lambda: _secret(settings)) if settings.present_token() else None
    keys = ReloadedFiles((settings.token_keys,), lambda: _keys(settings)) if settings.token_keys else None
    return Admission(shared, keys, certificates=bool(settings.tls_ca))


def _secret(settings: ServerSettings) -> TokenCheck | None:
    """The check of the shared secret; None while the token is a signed one. The program shows a signed token to other
    services, and they must not be able to use it as a secret here.
    """
    if not is_signed(settings.present_token()):
        return TokenCheck(settings.bearer())
    if not settings.token_keys:
        text = "is a signed token: set EBBTIDE_TOKEN_KEYS to the file of public keys that verify it"
        raise InvalidRequest(text, field="token")
    return None


def _keys(settings: ServerSettings) -> Keys:
    return public_keys(read_file(settings.token_keys, "token_keys"), field="token_keys")
