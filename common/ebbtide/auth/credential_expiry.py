"""Finds when a program's certificates and tokens expire. Without a metric, the first sign is that all calls fail."""

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from ebbtide.auth.role_tokens import is_signed, unverified
from ebbtide.auth.security import Credentials
from ebbtide.auth.tls import read_file
from ebbtide.errors import InvalidRequest

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
        found[CERTIFICATE] += _certificates(credentials.tls_cert)[:1]
        found[AUTHORITY] += _certificates(credentials.tls_ca)[-1:]
        found[TOKEN] += _token(credentials)
    return {kind: min(ends) for kind, ends in found.items() if ends}


def _credentials(settings: Any) -> Iterator[Credentials]:
    if isinstance(settings, Credentials):
        yield settings
    elif isinstance(settings, Struct):
        for name in settings.__struct_fields__:
            yield from _credentials(getattr(settings, name))


def _certificates(path: str) -> list[float]:
    """The expiry times of a file's certificates, earliest first."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(read_file(path, "tls_cert")) if path else []
    except (InvalidRequest, ValueError):
        return []
    return sorted(one.not_valid_after_utc.timestamp() for one in found)


def _token(credentials: Credentials) -> list[float]:
    try:
        token = credentials.bearer().removeprefix("Bearer ")
        return [unverified(token).expires] if is_signed(token) else []
    except InvalidRequest:
        return []
