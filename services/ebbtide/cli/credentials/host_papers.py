"""Lays out what the programs of hosts show and trust: a folder for each host, and nothing of others in it.

Invariant: what was made before stays until a third of its time is left; then it is made anew. The hosts' folders hold
copies, and nothing of a role that a host no longer has. `ca.key` and `tokens.key` are copied nowhere. A process may die
between the two files of a pair: the half that is left is made anew with the other, as nothing can have used it.
"""

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import certificates, signing_keys
from ebbtide.cli.credentials.certificates import make_folder, read_file, write_file
from ebbtide.errors import InvalidRequest
from ebbtide.types.ids import check_id

#: What the example settings of programs call their files.
FILES: Final = {
    Role.COORDINATOR: "coordinator",
    Role.RELAY: "weight-relay",
    Role.TRAINER: "trainer",
    Role.GATEWAY: "gateway",
    Role.WORKER: "rollout-worker",
    Role.OPERATOR: "admin",
}
#: They are called by their hosts' names. Another's certificate with such a name could pass for theirs.
SERVERS: Final = {Role.COORDINATOR, Role.RELAY, Role.GATEWAY}
_DAYS: Final = 90
_DAY_S: Final = 86400.0
_PERSON_S: Final = _DAY_S / 2
#: What has less than this part of its time left is made anew.
_NEAR_ITS_END: Final = 1 / 3


def parse_hosts(words: Sequence[str]) -> dict[str, tuple[Role, ...]]:
    """Reads HOST=ROLE[,ROLE...] for each host. Raises `InvalidRequest`."""
    found: dict[str, tuple[Role, ...]] = {}
    for word in words:
        host, equals, roles = word.partition("=")
        known = {str(role): role for role in FILES}
        if not equals or not set(roles.split(",")) <= set(known):
            raise InvalidRequest(
                f"{word!r} is not HOST=ROLE[,ROLE...] with roles {', '.join(known)}", field="HOST=ROLE"
            )
        if host in found:
            raise InvalidRequest(f"names {host} twice; give its roles in one word", field="HOST=ROLE")
        found[check_id(host, field="HOST=ROLE")] = tuple(known[role] for role in roles.split(","))
    return found


def lay_out(folder: Path, hosts: Mapping[str, Sequence[Role]]) -> list[Path]:
    """Makes what is missing in `folder`, or near its end: authority, signing key, a certificate and a token for each
    program. Returns the folders of the hosts, which go to their /etc/ebbtide/tls. Raises `InvalidRequest`, and
    `AlreadyExists` for half of an authority or of a signing key that others depend on.
    """
    authority, signing = folder / f"{certificates.CA}.key", folder / "tokens.key"
    if not (folder / f"{certificates.CA}.pem").exists():
        if not list(folder.glob("*.pem")):
            authority.unlink(missing_ok=True)
        certificates.init(folder, days=40 * _DAYS)
    if not signing.exists():
        issued = {path.name for end in ("pem", "token") for path in folder.glob(f"*.{end}")} - {
            f"{certificates.CA}.pem"
        }
        if not issued:
            (folder / "tokens.pub").unlink(missing_ok=True)
        signing_keys.make(folder)
    return [_lay_out(folder, host, roles) for host, roles in hosts.items()]


def _lay_out(folder: Path, host: str, roles: Sequence[Role]) -> Path:
    to = folder / "hosts" / host
    make_folder(to)
    laid = {_copy(folder / f"{certificates.CA}.pem", to / f"{certificates.CA}.pem", mode=0o644)}
    for role in roles:
        name, file = f"{host}-{role}", FILES[role]
        _certify(folder, name, role, host)
        laid.add(_copy(folder / f"{name}.pem", to / f"{file}.pem", mode=0o644))
        laid.add(_copy(folder / f"{name}.key", to / f"{file}.key", mode=0o600))
        if role in SERVERS:
            laid.add(_copy(folder / "tokens.pub", to / "tokens.pub", mode=0o644))
        if role is not Role.COORDINATOR:  # it calls nobody
            token = folder / f"{name}.token"
            ttl_s = _PERSON_S if role is Role.OPERATOR else _DAYS * _DAY_S
            if not token.exists() or signing_keys.read_token(token).expires - time.time() < ttl_s * _NEAR_ITS_END:
                signing_keys.put_token(token, signing_keys.issue(folder, role, run_id="", ttl_s=ttl_s, name=""))
            laid.add(_copy(token, to / f"{file}.token", mode=0o600))
    for path in set(to.iterdir()) - laid:
        path.unlink()
    return to


def _certify(folder: Path, name: str, role: Role, host: str) -> None:
    pair = [folder / f"{name}.pem", folder / f"{name}.key"]
    if all(path.exists() for path in pair):
        found = certificates.read(folder, name)
        if found.left(dt.datetime.now(dt.UTC)) < found.lifetime * _NEAR_ITS_END:
            certificates.renew(folder, name, days=0)
        return
    for path in pair:
        path.unlink(missing_ok=True)
    certificates.issue(folder, name, [role], [host] if role in SERVERS else [], days=_DAYS)


def _copy(source: Path, target: Path, *, mode: int) -> Path:
    write_file(target, read_file(source), mode=mode)
    return target
