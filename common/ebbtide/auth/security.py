"""Defines the security settings of servers and clients. Without TLS nothing leaves the loopback unless allowed.

`expiries` finds when a program's certificates and tokens expire. Without a metric, the first sign is that all calls
fail. The SDK installs without what verifies tokens, so that is imported where it is needed.
"""

import hmac
import ipaddress
from collections.abc import Iterator
from typing import Annotated, Any, Final, Self

import grpc
from msgspec import Meta, Struct

from ebbtide.auth.credential_files import Pair, ReloadedFiles, read_authority, read_file, read_pair
from ebbtide.auth.roles import AMONG_PEERS
from ebbtide.errors import InvalidRequest, NotReady

AUTHORIZATION: Final = "authorization"
#: gRPC refuses more than 8 KiB of headers.
_MAX_TOKEN: Final = 1024


def _shared(description: str, *, secret: bool = False) -> Meta:
    # "shared": read from EBBTIDE_<FIELD> too, whatever the service (ebbtide.settings).
    return Meta(description=description, extra={"shared": True, "secret": secret})


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that servers and clients share. A token is always needed: given, or in a file."""

    token: Annotated[str, _shared("shared secret of the cluster, or a signed token of a role", secret=True)] = ""
    token_file: Annotated[str, _shared("file that holds the token; reloaded when it changes")] = ""
    tls_ca: Annotated[
        str, _shared("PEM file of the authorities that must have signed the other side's certificate")
    ] = ""
    tls_cert: Annotated[str, _shared("PEM file of this program's certificate chain; reloaded when it changes")] = ""
    tls_key: Annotated[str, _shared("PEM file of this program's private key; reloaded when it changes")] = ""
    allow_insecure: Annotated[bool, _shared("allow addresses other than loopback without TLS")] = False

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields but the token, which is never shown."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "token"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def bearer(self) -> str:
        """The value of the authorization header. Raises `InvalidRequest` if there is no usable token."""
        token = self.present_token()
        if not token:
            raise InvalidRequest("is required: set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE", field="token")
        return f"Bearer {token}"

    def present_token(self) -> str:
        """The token, or an empty text."""
        if self.token and self.token_file:
            raise InvalidRequest("both token and token_file are set; leave one out", field="token_file")
        token = self.token or (
            read_file(self.token_file, "token_file").decode(errors="replace").strip() if self.token_file else ""
        )
        if not token.isascii() or not token.isprintable() or len(token) > _MAX_TOKEN:
            raise InvalidRequest(f"must be printable ASCII on one line of at most {_MAX_TOKEN}", field="token")
        return token

    def _pair(self) -> Pair | None:
        return read_pair(self.tls_cert, self.tls_key)

    def _authority(self) -> bytes | None:
        return read_authority(self.tls_ca) if self.tls_ca else None

    def _tls_files(self) -> tuple[str, ...]:
        return self.tls_ca, self.tls_cert, self.tls_key


class ServerSettings(Credentials, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server. A certificate turns TLS on; with `tls_ca`, clients must show a certificate, too.

    With `token_keys` callers need signed tokens of a role. The secret in `token` or `token_file` then counts, too,
    unless it is a signed token: such a token is for the program's own calls.
    """

    listen: Annotated[
        str, Meta(description="address to listen on, host:port or unix:path; port 0 picks a free port")
    ] = "127.0.0.1:0"
    max_streams: Annotated[int, Meta(ge=1, description="maximum concurrent RPCs on one connection")] = 1024
    max_unary_s: Annotated[float, Meta(gt=0, description="maximum seconds of a unary call")] = 60.0
    token_keys: Annotated[
        str, _shared("PEM file of public keys; callers then need tokens that these have signed (see ebbtide tokens)")
    ] = ""

    @classmethod
    def at(cls, listen: str) -> Self:
        """Defaults at another address, for a service's settings."""
        return cls(listen=listen)

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials, or None for a server without TLS. Raises `InvalidRequest` if that is not allowed.

        Connections made after the files were replaced use the new files.
        """
        if self._pair() is None:
            refuse_clear(self.listen, allowed=self.allow_insecure, field="listen")
            if self.tls_ca:
                raise InvalidRequest("a server with tls_ca needs a certificate", field="tls_cert")
            return None
        fresh: ReloadedFiles[Any] = ReloadedFiles(self._tls_files(), self._configuration)
        used = [fresh.get()]

        def renewed() -> Any:
            """The configuration from this connection on; None: unchanged. gRPC's threads call it one at a time."""
            former, used[0] = used[0], fresh.get()
            return None if used[0] is former else used[0]

        return grpc.dynamic_ssl_server_credentials(used[0], renewed, bool(self.tls_ca))

    def _configuration(self) -> Any:
        pair = self._pair()
        return grpc.ssl_server_certificate_configuration([pair] if pair else [], self._authority())


class ClientSecurity(Credentials, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's credentials. `tls` or `tls_ca` turn TLS on; without `tls_ca` the system's authorities count."""

    tls: Annotated[bool, _shared("use TLS with the system's authorities")] = False

    def credentials(self, target: str) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for a channel without TLS. Raises `InvalidRequest` if that is not allowed."""
        pair = self._pair()
        if not (self.tls or self.tls_ca):
            refuse_clear(target, allowed=self.allow_insecure, field="target")
            return None
        key, chain = pair or (None, None)
        return grpc.ssl_channel_credentials(self._authority(), key, chain)

    def check_peers(self) -> None:
        """Raise `NotReady` if workers must not see the token, because it permits more than theirs.

        This concerns signed tokens only: every worker knows the shared secret.
        """
        from ebbtide.auth.role_tokens import is_signed, unverified

        token = self.present_token()
        if is_signed(token) and (role := unverified(token).role) not in AMONG_PEERS:
            raise NotReady(f"a token of role {role} may be shown to relays, but not to workers that serve their peers")

    def fresh_bearer(self) -> ReloadedFiles[str]:
        """`bearer()` of the token's present file. Raises `InvalidRequest` if there is no usable token now."""
        return ReloadedFiles((self.token_file,), self.bearer)

    def fresh_credentials(self, target: str) -> ReloadedFiles[grpc.ChannelCredentials | None]:
        """`credentials()` of the present files. Raises the same errors."""
        return ReloadedFiles(self._tls_files(), lambda: self.credentials(target))


class TokenCheck:
    """Compares an authorization header with the expected one in constant time."""

    def __init__(self, bearer: str) -> None:
        self._expected = bearer.encode()

    def __call__(self, value: str | bytes) -> bool:
        return hmac.compare_digest(value.encode() if isinstance(value, str) else value, self._expected)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address` (host:port, [v6]:port or unix:path)."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_clear(address: str, *, allowed: bool, field: str) -> None:
    """Raise `InvalidRequest` for an address off the loopback, unless `allowed`."""
    if not allowed and not is_loopback(address):
        raise InvalidRequest(
            f"{address} is not loopback and TLS is off: the token and all data would travel in the clear; "
            "configure TLS, or set allow_insecure if you trust the network",
            field=field,
        )


CERTIFICATE: Final = "certificate"
AUTHORITY: Final = "authority"
TOKEN: Final = "token"  # noqa: S105 - a kind of credential


def expiries(settings: Struct) -> dict[str, float]:
    """The Unix times at which the first certificate, authority and signed token of these settings expire, by the files'
    present content. Of several authorities in one file the last to expire counts: all are trusted. Credentials that are
    not set, cannot be read or never expire are left out.
    """
    found: dict[str, list[float]] = {CERTIFICATE: [], AUTHORITY: [], TOKEN: []}
    for credentials in _credentials(settings):
        found[CERTIFICATE] += _certificate_expiries(credentials.tls_cert)[:1]
        found[AUTHORITY] += _certificate_expiries(credentials.tls_ca)[-1:]
        found[TOKEN] += _token_expiries(credentials)
    return {kind: min(ends) for kind, ends in found.items() if ends}


def _credentials(settings: Any) -> Iterator[Credentials]:
    if isinstance(settings, Credentials):
        yield settings
    elif isinstance(settings, Struct):
        for name in settings.__struct_fields__:
            yield from _credentials(getattr(settings, name))


def _certificate_expiries(path: str) -> list[float]:
    """The expiry times of a file's certificates, earliest first."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(read_file(path, "tls_cert")) if path else []
    except (InvalidRequest, ValueError):
        return []
    return sorted(one.not_valid_after_utc.timestamp() for one in found)


def _token_expiries(credentials: Credentials) -> list[float]:
    from ebbtide.auth.role_tokens import is_signed, unverified

    try:
        token = credentials.bearer().removeprefix("Bearer ")
        return [unverified(token).expires] if is_signed(token) else []
    except InvalidRequest:
        return []
