"""Mints and verifies tokens with a role, an expiry and perhaps one run: Ed25519-signed JWTs (RFC 7519, RFC 8037).

A public key verifies but cannot mint. Clocks of machines may differ by a minute. The SDK only carries tokens and
installs without PyJWT, so PyJWT is imported where it is needed.

`VerifiedTokens` verifies signed tokens once, and remembers what they claim. Invariant: only tokens that the present
keys verified are remembered. A restart verifies again.
"""

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from msgspec import Struct

from ebbtide.auth.roles import Role
from ebbtide.errors import InvalidRequest, Unauthenticated
from ebbtide.types.ids import check_id
from ebbtide.types.session import KeyLimits

_ALGORITHM: Final = "EdDSA"
#: Issuer, audience and type: JWTs for other uses that the same key signs are refused.
_KIND: Final = "ebbtide"
_TYPE: Final = "ebbtide+jwt"
SKEW_S: Final = 60
#: The end of the year 9999 in Unix time. `datetime` has no later dates.
_LAST: Final = 253402300800
_PUBLIC: Final = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_UNLIMITED: Final = KeyLimits()
#: Public keys by their ids.
Keys = Mapping[str, Ed25519PublicKey]


class Claims(Struct, frozen=True, kw_only=True):
    """The content of a token."""

    role: Role
    expires: float  # Unix time; servers refuse it `SKEW_S` later
    run_id: str = ""  # the only run that it is for; empty: every run
    name: str = ""  # for people
    limits: KeyLimits = KeyLimits()  # of a gateway's client on that run
    session_id: str = ""  # the only session of gateways that it may play; empty: any


def mint(
    key: Ed25519PrivateKey,
    role: Role,
    *,
    ttl_s: float,
    run_id: str = "",
    name: str = "",
    limits: KeyLimits = _UNLIMITED,
    session_id: str = "",
) -> str:
    """A token that is valid for `ttl_s` seconds from now. Raises `InvalidRequest` for a bad run id or name."""
    import jwt

    now = time.time()
    claims = {"iss": _KIND, "aud": _KIND, "role": str(role), "iat": int(now), "exp": int(now + ttl_s)}
    claims |= {"jti": secrets.token_hex(8)}
    claims |= {"run": check_id(run_id, field="run")} if run_id else {}
    claims |= {"sub": check_id(name, field="name")} if name else {}
    claims |= {"limits": msgspec.to_builtins(limits)} if limits != _UNLIMITED else {}
    claims |= {"session": session_id} if session_id else {}
    return jwt.encode(claims, key, _ALGORITHM, headers={"kid": key_id(key.public_key()), "typ": _TYPE})


def verify(token: str, keys: Keys) -> Claims:
    """The claims of a token that one of `keys` signed. Raises `Unauthenticated` for others, and for expired ones."""
    import jwt

    try:
        header = jwt.get_unverified_header(token)
        key = keys.get(str(header.get("kid")))
        if key is None or header.get("typ") != _TYPE:
            raise Unauthenticated("the token was signed by a key that this server does not know; ask for a new one")
        claims = jwt.decode(
            token,
            key,
            algorithms=[_ALGORITHM],
            audience=_KIND,
            issuer=_KIND,
            leeway=SKEW_S,
            options={"require": ["exp", "iat", "role"]},
        )
        return _claims(claims)
    except jwt.ExpiredSignatureError:
        raise Unauthenticated(
            "the token has expired; issue another one (ebbtide tokens issue) into its file, which is read again "
            "without a restart"
        ) from None
    except (jwt.PyJWTError, ValueError, TypeError):
        raise Unauthenticated("the token is no valid one; issue another one (ebbtide tokens issue)") from None


def unverified(token: str) -> Claims:
    """The claims of a token of any signer. Raises `InvalidRequest` for anything else. Needs no PyJWT."""
    try:
        body = token.split(".")[1]
        return _claims(msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=dict))
    except (msgspec.MsgspecError, IndexError, KeyError, ValueError, TypeError):
        raise InvalidRequest("is no token of a role; ebbtide tokens issue makes one", field="token") from None


def run_of_token(bearer: str) -> str:
    """The only run that the caller's own token (`Bearer TOKEN`) is for; "" for a shared secret, and for all runs."""
    token = bearer.removeprefix("Bearer ")
    return unverified(token).run_id if is_signed(token) else ""


def _claims(found: Mapping[str, Any]) -> Claims:
    """Raises `KeyError`, `TypeError` or `ValueError` for claims that `mint` never makes."""
    expires, run_id = found["exp"], found.get("run")
    if not 0 <= expires < _LAST:
        raise ValueError("no time")
    # A token for one run whose run is empty must not become valid for every run.
    if "run" in found and (not run_id or not isinstance(run_id, str)):
        raise ValueError("no run")
    session_id = found.get("session", "")
    if "session" in found and (not session_id or not isinstance(session_id, str)):
        raise ValueError("no session")
    return Claims(
        role=Role(found["role"]),
        expires=float(expires),
        run_id=run_id or "",
        name=str(found.get("sub", "")),
        limits=_limits(found.get("limits", {})),
        session_id=session_id,
    )


def _limits(found: Any) -> KeyLimits:
    """A token with a limit that is not known here is refused: without it the limit would not hold."""
    if not isinstance(found, dict) or not found.keys() <= set(KeyLimits.__struct_fields__):
        raise ValueError("no limits")
    try:
        return msgspec.convert(found, KeyLimits)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def is_signed(token: str) -> bool:
    """Whether a token looks like a JWT. If so, it is for its holder's own calls, not a shared secret."""
    return token.startswith("ey") and token.count(".") == 2


def key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def public_keys(pem: bytes, *, field: str) -> dict[str, Ed25519PublicKey]:
    """The public keys of a PEM file, by their ids. Raises `InvalidRequest` naming `field` for anything else."""
    if b"PRIVATE KEY-----" in pem:
        raise InvalidRequest(
            "holds a private key, with which anybody can mint tokens: give servers the public keys", field=field
        )
    found = {}
    for block in _PUBLIC.findall(pem):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm):
            raise InvalidRequest("holds a public key that cannot be read", field=field) from None
        if not isinstance(key, Ed25519PublicKey):
            raise InvalidRequest("holds a key that is not Ed25519; ebbtide tokens key makes one", field=field)
        found[key_id(key)] = key
    if not found:
        raise InvalidRequest("holds no public key (PEM); ebbtide tokens key makes one", field=field)
    return found


def signing_key(pem: bytes, *, field: str) -> Ed25519PrivateKey:
    """Raises `InvalidRequest` naming `field` for anything but an Ed25519 key in PEM."""
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidRequest("is no Ed25519 private key in PEM; ebbtide tokens key makes one", field=field)
    return key


#: Tokens to remember: to check a signature takes a tenth of a millisecond. Beyond so many all are verified again.
_MOST_KNOWN: Final = 4096


class VerifiedTokens:
    def __init__(self) -> None:
        self._known: dict[str, Claims] = {}
        self._known_by: Keys | None = None

    def claims(self, token: str, keys: Keys) -> Claims:
        """The claims of a token that one of `keys` signed. Raises `Unauthenticated` for others and expired ones."""
        if keys is not self._known_by or len(self._known) >= _MOST_KNOWN:
            self._known, self._known_by = {}, keys
        claims = self._known.get(token)
        if claims is None or claims.expires + SKEW_S <= time.time():
            claims = self._known[token] = verify(token, keys)
        return claims
