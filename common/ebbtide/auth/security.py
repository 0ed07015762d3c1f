"""Who may talk to whom: tokens, TLS, and the rule that nothing leaves the loopback in the clear unless allowed."""

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
    """What servers and clients have in common. A token is always needed: given, or in a file."""

    token: Annotated[str, _shared("secret that a cluster shares, or a signed token of a role", secret=True)] = ""
    token_file: Annotated[str, _shared("file that holds the token; read again when it changes")] = ""
    tls_ca: Annotated[str, _shared("PEM file of the authorities that the other side's certificate must come from")] = ""
    tls_cert: Annotated[str, _shared("PEM file of the own certificate chain; read again when it changes")] = ""
    tls_key: Annotated[str, _shared("PEM file of the own private key; read again when it changes")] = ""
    allow_insecure: Annotated[bool, _shared("allow addresses other than loopback without TLS")] = False

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All but the token, which is never shown."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "token"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def bearer(self) -> str:
        """The value of the authorization header. Raises `InvalidRequest` when there is no usable token."""
        token = self._token()
        if not token:
            raise InvalidRequest("is required: set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE", field="token")
        return f"Bearer {token}"

    def _token(self) -> str:
        """The token, or nothing."""
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
    """Where a server listens. TLS is on with a certificate; with `tls_ca` too, clients must show one.

    With `token_keys` callers need signed tokens, each for a role. A shared secret counts beside them only where `token`
    or `token_file` is set too, and is not itself a signed token: that one is for the calls that the program makes.
    """

    listen: Annotated[str, Meta(description="address: host:port (port 0: any free one) or unix:path")] = "127.0.0.1:0"
    max_streams: Annotated[int, Meta(ge=1, description="RPCs at once on one connection")] = 1024
    max_unary_s: Annotated[float, Meta(gt=0, description="longest time that a unary call may take")] = 60.0
    token_keys: Annotated[
        str, _shared("PEM file of public keys; then callers need tokens that these have signed (ebbtide tokens)")
    ] = ""

    @classmethod
    def at(cls, listen: str) -> Self:
        """Defaults with another address, for a service's settings."""
        return cls(listen=listen)

    def admission(self) -> "Admission":
        """What decides who may call. Raises `InvalidRequest` for settings by which nobody could, or the wrong ones."""
        from ebbtide.auth.admission import Admission

        if not self.token_keys and not self._token():
            raise InvalidRequest("is required: set EBBTIDE_TOKEN_FILE, or EBBTIDE_TOKEN_KEYS", field="token")
        shared = ReloadedFiles((self.token_file,), self._secret) if self._token() else None
        keys = ReloadedFiles((self.token_keys,), self._keys) if self.token_keys else None
        return Admission(shared, keys, certificates=bool(self.tls_ca))

    def _secret(self) -> "TokenCheck | None":
        """What the shared secret is compared with. None while the token is a signed one: the program shows that one to
        others, and none of them may come with it as with a secret.
        """
        from ebbtide.auth.role_tokens import is_signed

        if not is_signed(self._token()):
            return TokenCheck(self.bearer())
        if not self.token_keys:
            text = "is a signed one, which a server verifies by public keys: set EBBTIDE_TOKEN_KEYS to their file"
            raise InvalidRequest(text, field="token")
        return None

    def _keys(self) -> "Keys":
        from ebbtide.auth.role_tokens import public_keys

        return public_keys(read_file(self.token_keys, "token_keys"), field="token_keys")

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials, or None for a server in the clear. Raises `InvalidRequest` where that is not allowed.

        Connections made after the files were replaced have the new ones.
        """
        if self._pair() is None:
            refuse_clear(self.listen, allowed=self.allow_insecure, field="listen")
            if self.tls_ca:
                raise InvalidRequest("a server with tls_ca needs a certificate", field="tls_cert")
            return None
        fresh: ReloadedFiles[Any] = ReloadedFiles(self._tls_files(), self._configuration)
        used = [fresh.get()]

        def renewed() -> Any:
            """What to use from this connection on, or None for no change. Called by gRPC's threads, one at a time."""
            former, used[0] = used[0], fresh.get()
            return None if used[0] is former else used[0]

        return grpc.dynamic_ssl_server_credentials(used[0], renewed, bool(self.tls_ca))

    def _configuration(self) -> Any:
        pair = self._pair()
        return grpc.ssl_server_certificate_configuration([pair] if pair else [], self._authority())


class ClientSecurity(Credentials, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client proves itself. TLS is on with `tls`, or with `tls_ca` (without: the system's authorities)."""

    tls: Annotated[bool, _shared("use TLS with the system's authorities")] = False

    def credentials(self, target: str) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for a channel in the clear. Raises `InvalidRequest` where that is not allowed."""
        pair = self._pair()
        if not (self.tls or self.tls_ca):
            refuse_clear(target, allowed=self.allow_insecure, field="target")
            return None
        key, chain = pair or (None, None)
        return grpc.ssl_channel_credentials(self._authority(), key, chain)

    def check_peers(self) -> None:
        """Raise `NotReady` where workers must not be shown the token: it may do more than theirs.

        Only a signed token says what it may do; the shared secret is known to all of them anyway.
        """
        from ebbtide.auth.role_tokens import is_signed, unverified

        token = self._token()
        if is_signed(token) and (role := unverified(token).role) not in AMONG_PEERS:
            raise NotReady(f"a token of role {role} is shown to relays, and not to workers that serve their peers")

    def fresh_bearer(self) -> ReloadedFiles[str]:
        """`bearer()` of the token's file as it is. Raises `InvalidRequest` when there is no usable token now."""
        return ReloadedFiles((self.token_file,), self.bearer)

    def fresh_credentials(self, target: str) -> ReloadedFiles[grpc.ChannelCredentials | None]:
        """`credentials()` of the files as they are. Raises like it."""
        return ReloadedFiles(self._tls_files(), lambda: self.credentials(target))


class TokenCheck:
    """Compares an authorization in constant time. Holds nothing but the expected value."""

    def __init__(self, bearer: str) -> None:
        self._expected = bearer.encode()

    def __call__(self, value: str | bytes) -> bool:
        return hmac.compare_digest(value.encode() if isinstance(value, str) else value, self._expected)


def is_loopback(address: str) -> bool:
    """Whether `address` (host:port, [v6]:port or unix:path) can only be reached from this machine."""
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
            "configure TLS, or set allow_insecure on a network that you trust",
            field=field,
        )
