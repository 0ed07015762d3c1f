"""Keeps the key that signs tokens in a folder: `tokens.key`, and `tokens.pub` with the trusted public keys.

Invariant: the first key of `tokens.pub` is that of `tokens.key`; the others are former ones. Both files are replaced as
a whole, `tokens.pub` first: a process that dies between the two leaves a trusted key whose private half does not exist.
"""

from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from ebbtide.auth.role_tokens import Claims, is_signed, mint, public_keys, signing_key, unverified
from ebbtide.auth.roles import OF_ONE_RUN, Role
from ebbtide.cli.credentials.certificates import make_folder, read_file, write_file
from ebbtide.errors import AlreadyExists, InvalidRequest
from ebbtide.types.ids import check_session_name
from ebbtide.types.session import KeyLimits

_PRIVATE: Final = "tokens.key"
_PUBLIC: Final = "tokens.pub"
_LONGEST_S: Final = 10 * 365 * 86400.0
_UNLIMITED: Final = KeyLimits()


def make(folder: Path) -> Path:
    """Makes the first key of a folder. Raises `AlreadyExists` if there is one, or a public half."""
    if (folder / _PRIVATE).exists():
        raise AlreadyExists(f"{folder} has a signing key already; --rotate adds another one")
    if (folder / _PUBLIC).exists():
        text = f"{folder} has public keys ({_PUBLIC}) without their {_PRIVATE}"
        raise AlreadyExists(f"{text}; name another folder, or remove them first")
    make_folder(folder)
    return _write(folder, Ed25519PrivateKey.generate(), [])


def rotate(folder: Path) -> Path:
    """Makes another signing key; tokens of former ones stay valid. Raises `InvalidRequest` if there is none yet."""
    _signing(folder)
    return _write(folder, Ed25519PrivateKey.generate(), list(_trusted(folder)))


def retire(folder: Path) -> Path:
    """Trusts only the present signing key. Raises `InvalidRequest` if there is none."""
    return _write(folder, _signing(folder), [])


def issue(
    folder: Path,
    role: Role,
    *,
    run_id: str,
    ttl_s: float,
    name: str,
    limits: KeyLimits = _UNLIMITED,
    session_id: str = "",
) -> str:
    """Returns a token. Raises `InvalidRequest` for a role that cannot be bound to a run, too long a time, and limits or
    a session of anything but an agent's key: of one run, and of a name whose other keys end the session. A
    session's name must be one that gateways take.
    """
    if session_id and (role is not Role.AGENT or not name):
        text = "is for keys of role agent with a name, under which others end the session (--role agent --name NAME)"
        raise InvalidRequest(text, field="--session")
    check_session_name(session_id, field="--session")
    if limits != _UNLIMITED and (role is not Role.AGENT or not run_id):
        text = "limits are for keys of role agent that are bound to a run (--role agent --run RUN)"
        raise InvalidRequest(
            text, field=next(iter(f"--{name.replace('_', '-')}" for name in msgspec.to_builtins(limits)))
        )
    if run_id and role not in OF_ONE_RUN:
        *roles, last = sorted(OF_ONE_RUN)
        only = f"only tokens of {', '.join(roles)} and {last}"
        raise InvalidRequest(f"a {role} works on all runs; {only} take a run", field="--run")
    if ttl_s > _LONGEST_S:
        raise InvalidRequest("is more than ten years; a token must be replaced now and then", field="--ttl")
    return mint(_signing(folder), role, ttl_s=ttl_s, run_id=run_id, name=name, limits=limits, session_id=session_id)


def put_token(file: Path, token: str) -> None:
    """Writes a token into a file. Raises `AlreadyExists` for a file that holds anything but a token."""
    if file.exists():
        found = read_file(file).strip()
        if found and not is_signed(found.decode(errors="replace")):
            raise AlreadyExists(f"{file} holds no signed token; name another file, or remove it first")
    write_file(file, f"{token}\n".encode(), mode=0o600)


def read_token(file: Path) -> Claims:
    """Raises `InvalidRequest` for a file that holds no token of a role."""
    return unverified(read_file(file).decode(errors="replace").strip())


def _signing(folder: Path) -> Ed25519PrivateKey:
    path = folder / _PRIVATE
    if not path.exists():
        raise InvalidRequest(f"{folder} has no signing key; ebbtide tokens key makes one", field="--dir")
    return signing_key(read_file(path), field=str(path))


def _trusted(folder: Path) -> list[Ed25519PublicKey]:
    path = folder / _PUBLIC
    return list(public_keys(read_file(path), field=str(path)).values())


def _write(folder: Path, key: Ed25519PrivateKey, former: list[Ed25519PublicKey]) -> Path:
    public = [one.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for one in (key.public_key(), *former)]
    write_file(folder / _PUBLIC, b"".join(public), mode=0o644)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_file(folder / _PRIVATE, private, mode=0o600)
    return folder / _PUBLIC
