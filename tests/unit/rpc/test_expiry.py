"""What ends is told before it has: of all that a program's settings name, and of the files as they are."""

import time
from pathlib import Path

import pytest

from ebbtide.auth.role_tokens import mint, signing_key
from ebbtide.auth.roles import Role
from ebbtide.auth.security import AUTHORITY, CERTIFICATE, TOKEN, expiries
from ebbtide.cli.credentials import certificates, signing_keys
from ebbtide.weight_relay.settings import RelaySettings

DAY_S = 86400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority for 100 days, certificates for 30 and 10, tokens for 20 and 5."""
    certificates.init(tmp_path, 100)
    for name, days in (("long", 30), ("short", 10)):
        certificates.issue(tmp_path, name, [Role.RELAY], ["127.0.0.1"], days)
    signing_keys.make(tmp_path)
    for name, days in (("long", 20), ("short", 5)):
        (tmp_path / f"{name}.token").write_text(token(tmp_path, days))
    return tmp_path


def token(folder: Path, days: int) -> str:
    return mint(signing_key((folder / "tokens.key").read_bytes(), field="key"), Role.RELAY, ttl_s=days * DAY_S)


def relay(folder: Path, **names: str) -> RelaySettings:
    """Settings whose server and upstream have these papers."""
    parts = {
        part: {
            "tls_ca": str(folder / "ca.pem"),
            "tls_cert": str(folder / f"{name}.pem"),
            "tls_key": str(folder / f"{name}.key"),
            "token_file": str(folder / f"{name}.token"),
        }
        for part, name in names.items()
    }
    fields = {part: type(getattr(RelaySettings(data_dir="d"), part))(**given) for part, given in parts.items()}
    return RelaySettings(data_dir="d", **fields)


def in_days(found: dict[str, float]) -> dict[str, float]:
    return {kind: round((end - time.time()) / DAY_S, 2) for kind, end in found.items()}


def test_the_first_of_each_kind_counts(folder: Path) -> None:
    both = relay(folder, server="long", coordinator_security="short")
    assert in_days(expiries(both)) == {CERTIFICATE: 10, AUTHORITY: 100, TOKEN: 5}


def test_a_file_that_was_replaced_is_read_anew(folder: Path) -> None:
    settings = relay(folder, server="short")
    certificates.renew(folder, "short", 40)
    (folder / "short.token").write_text(token(folder, 15))
    assert in_days(expiries(settings)) == {CERTIFICATE: 40, AUTHORITY: 100, TOKEN: 15}


def test_of_authorities_that_are_trusted_side_by_side_the_last_one_counts(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    certificates.init(other, 200)
    with (folder / "ca.pem").open("ab") as file:
        file.write((other / "ca.pem").read_bytes())
    assert in_days(expiries(relay(folder, server="long")))[AUTHORITY] == 200


def test_what_has_no_end_or_cannot_be_read_is_left_out(folder: Path) -> None:
    (folder / "long.token").write_text("a shared secret")
    (folder / "long.pem").write_text("torn")
    assert in_days(expiries(relay(folder, server="long"))) == {AUTHORITY: 100}
    assert expiries(RelaySettings(data_dir="d")) == {}
