"""Defines the security settings of servers and clients. Without TLS nothing leaves the loopback unless allowed."""

import hmac
import ipaddress
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import grpc
from msgspec import Meta, Struct

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.auth.roles import AMONG_PEERS
from ebbtide.auth.tls import Pair, read_authority, read_file, read_pair
from ebbtide.errors import InvalidRequest, NotReady

if TYPE_CHECKING:
    from ebbtide.auth.admission import Admission
    from ebbtide.auth.role_tokens import Keys

AUTHORIZATION: Final = "authorization"
#: gRPC refuses more than 8 KiB of headers.
_MAX_TOKEN: Final = 1024


def _shared(description: str, *, secret: bool = False) -> Meta:
    # "shared": read from EBBTIDE_<FIELD> too, whatever the service (ebbtide.settings).
    return Meta(description=description, extra={"shared": True, "secret": secret})


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that servers and clients share. A token is always needed: given, or in a file."""

    token: Annotated[str, _shared("secret that a cluster shares, or a signed token of a role", secret=True)] = ""
    token_file: Annotated[str, _shared("file that holds the token; read again when it changes")] = ""
    tls_ca: Annotated[str, _shared("PEM file of the authorities that the other side's certificate must come from")] = ""
    tls_cert: Annotated[str, _shared("PEM file of the own certificate chain; read again when it changes")] = ""
    tls_key: Annotated[str, _shared("PEM file of the own private key; read again when it changes")] = ""
    allow_insecure: Annotated[bool, _shared("allow addresses other than loopback without TLS")] = False

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields but the token, which is never shown."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "token"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def bearer(self) -> str:
        """The value of the authorization header. Raises `InvalidRequest` if there is no usable token."""
        token = self._token()
        if not token:
            raise InvalidRequest("is required: set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE", field="token")
        return f"Bearer {token}"

    def _token(self) -> str:
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

    listen: Annotated[str, Meta(description="address: host:port (port 0: any free one) or unix:path")] = "127.0.0.1:0"
    max_streams: Annotated[int, Meta(ge=1, description="RPCs at once on one connection")] = 1024
    max_unary_s: Annotated[float, Meta(gt=0, description="longest time that a unary call may take")] = 60.0
    token_keys: Annotated[
        str, _shared("PEM file of public keys; then callers need tokens that these have signed (ebbtide tokens)")
    ] = ""

    @classmethod
    def at(cls, listen: str) -> Self:
        """Defaults at another address, for a service's settings."""
        return cls(listen=listen)

    def admission(self) -> "Admission":
        """The check before every call. Raises `InvalidRequest` for settings that admit nobody, or the wrong callers."""
        from ebbtide.auth.admission import Admission

        if not self.token_keys and not self._token():
            raise InvalidRequest("is required: set EBBTIDE_TOKEN_FILE, or EBBTIDE_TOKEN_KEYS", field="token")
        shared = ReloadedFiles((self.token_file,), self._secret) if self._token() else None
        keys = ReloadedFiles((self.token_keys,), self._keys) if self.token_keys else None
        return Admission(shared, keys, certificates=bool(self.tls_ca))

    def _secret(self) -> "TokenCheck | None":
        """The check of the shared secret; None while the token is a signed one. The program shows a signed token to
        other services, and they must not be able to use it as a secret here.
        """
        from ebbtide.auth.role_tokens import is_signed

        if not is_signed(self._token()):
            return TokenCheck(self.bearer())
        if not self.token_keys:
            text = "is a signed token: set EBBTIDE_TOKEN_KEYS to the file of public keys that verify it"
            raise InvalidRequest(text, field="token")
        return None

    def _keys(self) -> "Keys":
        from ebbtide.auth.role_tokens import public_keys

        return public_keys(read_file(self.token_keys, "token_keys"), field="token_keys")

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

        token = self._token()
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
