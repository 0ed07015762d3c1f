"""Who may talk to whom: tokens, TLS, and the rule that nothing leaves the loopback in the clear unless allowed."""

import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Self

import grpc
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest

AUTHORIZATION: Final = "authorization"
#: gRPC refuses more than 8 KiB of headers.
_MAX_TOKEN: Final = 1024


def _shared(description: str, *, secret: bool = False) -> Meta:
    # "shared": read from EBBTIDE_<FIELD> too, whatever the service (ebbtide.settings).
    return Meta(description=description, extra={"shared": True, "secret": secret})


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What servers and clients have in common. A token is always needed: given, or in a file."""

    token: Annotated[str, _shared("secret that all services and clients of a cluster share", secret=True)] = ""
    token_file: Annotated[str, _shared("file that holds the token")] = ""
    tls_ca: Annotated[str, _shared("PEM file of the authority that the other side's certificate must come from")] = ""
    tls_cert: Annotated[str, _shared("PEM file of the own certificate chain")] = ""
    tls_key: Annotated[str, _shared("PEM file of the own private key")] = ""
    allow_insecure: Annotated[bool, _shared("allow addresses other than loopback without TLS")] = False

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All but the token, which is never shown."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "token"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def bearer(self) -> str:
        """The value of the authorization header. Raises `InvalidRequest` when there is no usable token."""
        if self.token and self.token_file:
            raise InvalidRequest("both token and token_file are set; leave one out", field="token_file")
        token = self.token or (
            _read(self.token_file, "token_file").decode(errors="replace").strip() if self.token_file else ""
        )
        if not token:
            raise InvalidRequest("is required: set EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE", field="token")
        if not token.isascii() or not token.isprintable() or len(token) > _MAX_TOKEN:
            raise InvalidRequest(f"must be printable ASCII on one line of at most {_MAX_TOKEN}", field="token")
        return f"Bearer {token}"

    def _pair(self) -> tuple[bytes, bytes] | None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequest("tls_cert and tls_key go together", field="tls_key" if self.tls_cert else "tls_cert")
        return (_pem(self.tls_key, "tls_key"), _pem(self.tls_cert, "tls_cert")) if self.tls_cert else None


class ServerSettings(Credentials, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a server listens. TLS is on with a certificate; with `tls_ca` too, clients must show one."""

    listen: Annotated[str, Meta(description="address: host:port (port 0: any free one) or unix:path")] = "127.0.0.1:0"
    max_streams: Annotated[int, Meta(ge=1, description="RPCs at once on one connection")] = 1024
    max_unary_s: Annotated[float, Meta(gt=0, description="longest time that a unary call may take")] = 60.0

    @classmethod
    def at(cls, listen: str) -> Self:
        """Defaults with another address, for a service's settings."""
        return cls(listen=listen)

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials, or None for a server in the clear. Raises `InvalidRequest` where that is not allowed."""
        pair = self._pair()
        if pair is None:
            refuse_clear(self.listen, allowed=self.allow_insecure, field="listen")
            if self.tls_ca:
                raise InvalidRequest("a server with tls_ca needs a certificate", field="tls_cert")
            return None
        authority = _pem(self.tls_ca, "tls_ca") if self.tls_ca else None
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


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
        return grpc.ssl_channel_credentials(_pem(self.tls_ca, "tls_ca") if self.tls_ca else None, key, chain)


class TokenCheck:
    """Compares the authorization of calls in constant time. Holds nothing but the expected value."""

    def __init__(self, bearer: str) -> None:
        self._expected = bearer.encode()

    def __call__(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        for key, value in metadata or ():
            if key == AUTHORIZATION:
                return hmac.compare_digest(value.encode() if isinstance(value, str) else value, self._expected)
        return False


def anyone(_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Instead of a `TokenCheck` on a socket that only this user can open: its folder's mode is the check."""
    return True


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


def _pem(path: str, field: str) -> bytes:
    content = _read(path, field)
    if b"-----BEGIN " not in content:
        raise InvalidRequest(f"{path} is no PEM file", field=field)
    return content


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}", field=field) from None
