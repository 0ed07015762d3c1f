"""Who is who on the hosts: an authority, a certificate for each program that says its role, and signed tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import certificates, signing_keys

#: program -> what it is, and the host whose address its certificate names.
_ROLES: Final = {
    "coordinator": (Role.COORDINATOR, "control"),
    "relay": (Role.RELAY, "relay"),
    "trainer": (Role.TRAINER, ""),
    "driver": (Role.TRAINER, ""),
    "a": (Role.WORKER, ""),
    "b": (Role.WORKER, ""),
    "serving": (Role.WORKER, ""),
    "gateway": (Role.GATEWAY, "gateway"),
    "user": (Role.USER, ""),
}
_SERVE: Final = {Role.COORDINATOR, Role.RELAY, Role.GATEWAY}
_TOKEN_S: Final = 3600.0
_DAYS: Final = 1


class Identities:
    """All of them in `folder`, made with it."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        self.folder = folder
        certificates.init(folder, days=_DAYS + 1)
        signing_keys.make(folder)
        for name, (role, host) in _ROLES.items():
            certificates.issue(folder, name, [role], [addresses[host]] if host else [], days=_DAYS)
            self._token(name)

    def environment(self, name: str) -> dict[str, str]:
        """What makes a program `name`."""
        own = {"EBBTIDE_TOKEN_FILE": f"{name}.token"} if _calls(name) else {}
        own |= {"EBBTIDE_TOKEN_KEYS": "tokens.pub"} if _ROLES[name][0] in _SERVE else {}
        files = {"EBBTIDE_TLS_CA": "ca.pem", "EBBTIDE_TLS_CERT": f"{name}.pem", "EBBTIDE_TLS_KEY": f"{name}.key"}
        return {variable: str(self.folder / file) for variable, file in {**files, **own}.items()}

    def rotate(self) -> None:
        """Another certificate, key and token for every program, in the places of the former ones, and another signing
        key, beside which the former one still counts."""
        signing_keys.rotate(self.folder)
        for name in _ROLES:
            certificates.renew(self.folder, name, days=0)
            self._token(name)

    def retire(self) -> None:
        """Let the former signing key count no more."""
        signing_keys.retire(self.folder)

    def agent_key(self, run_id: str) -> str:
        """What a client of gateways shows, for one run."""
        return signing_keys.issue(self.folder, Role.AGENT, run_id=run_id, ttl_s=_TOKEN_S, name="team")

    def _token(self, name: str) -> None:
        if _calls(name):
            token = signing_keys.issue(self.folder, _ROLES[name][0], run_id="", ttl_s=_TOKEN_S, name=name)
            certificates.write_file(self.folder / f"{name}.token", token.encode(), mode=0o600)


def _calls(name: str) -> bool:
    return _ROLES[name][0] is not Role.COORDINATOR
