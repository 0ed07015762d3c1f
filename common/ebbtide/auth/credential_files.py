"""Reads tokens, certificates and keys of files, again when they change: operators replace them while programs run.

Certificates and keys are checked to match. A role is a URI among a certificate's alternative names, such as
`ebbtide:role:worker`. A certificate without such a URI is bound to no role.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from ebbtide.auth.roles import Role
from ebbtide.errors import InvalidRequest

log = logging.getLogger(__name__)

T = TypeVar("T")


class ReloadedFiles(Generic[T]):
    """`get()` returns what `make` makes of the present files. While they are unusable (half of a pair was replaced, a
    file is gone) it returns the last value, and logs this once. It costs a microsecond or two per file.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        """Raises what `make` raises."""
        self._paths, self._make = [Path(path) for path in paths if path], make
        self._seen = self._state()
        self._value = make()

    def get(self) -> T:
        state = self._state()
        if state != self._seen:
            self._seen = state  # taken before the files are read, so a change meanwhile is seen next time
            try:
                self._value = self._make()
            except InvalidRequest as error:
                log.warning("a changed file cannot be used, so its former content stays in use: %s", error)
        return self._value

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


ROLE_URI: Final = "ebbtide:role:"
#: Private key and certificate chain, as gRPC takes them.
Pair = tuple[bytes, bytes]


def read_pair(cert: str, key: str) -> Pair | None:
    """The key and the chain of two files; None if neither is set. Raises `InvalidRequest` naming the wrong field."""
    if bool(cert) != bool(key):
        raise InvalidRequest("tls_cert and tls_key go together", field="tls_key" if cert else "tls_cert")
    if not cert:
        return None
    pair = read_pem(key, "tls_key"), read_pem(cert, "tls_cert")
    _check_pair(*pair, key)
    return pair


def read_pem(path: str, field: str) -> bytes:
    content = read_file(path, field)
    if b"-----BEGIN " not in content:
        raise InvalidRequest(f"{path} is no PEM file", field=field)
    return content


def read_authority(path: str) -> bytes:
    """The certificates of a file. Raises `InvalidRequest` naming `tls_ca` unless all can be read: gRPC would report
    nothing, and every handshake would fail.
    """
    from cryptography import x509

    content = read_pem(path, "tls_ca")
    try:
        x509.load_pem_x509_certificates(content)
    except ValueError:
        raise InvalidRequest(f"{path} holds an unreadable certificate, or none", field="tls_ca") from None
    return content


def read_file(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}", field=field) from None


def _check_pair(key: bytes, chain: bytes, path: str) -> None:
    """Refuse halves that do not match: gRPC would accept them, and every handshake would fail."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate(chain)
    except ValueError:
        raise InvalidRequest("holds no readable certificate", field="tls_cert") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidRequest(f"{path} holds no private key without a password", field="tls_key") from None
    if private.public_key() != certificate.public_key():
        raise InvalidRequest(f"{path} is not the key of the certificate in tls_cert", field="tls_key")


def roles_of(uris: Iterable[str]) -> frozenset[Role]:
    """The roles among a certificate's URIs."""
    known = {f"{ROLE_URI}{role}": role for role in Role}
    return frozenset(known[uri] for uri in uris if uri in known)


def roles_of_peer(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role] | None:
    """The roles of the other side's certificate; None if it is bound to no role."""
    uris = [uri.decode(errors="replace") for uri in auth_context.get("peer_uri", ())]
    return roles_of(uris) if any(uri.startswith(ROLE_URI) for uri in uris) else None
