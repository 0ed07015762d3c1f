"""Each host gets what its programs show and trust, and nothing of others."""

import datetime as dt
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.auth.role_tokens import public_keys, verify
from ebbtide.auth.roles import Role
from ebbtide.cli.__main__ import app
from ebbtide.cli.credentials import certificates, signing_keys
from ebbtide.cli.credentials.host_papers import FILES, SERVERS, lay_out, parse_hosts
from ebbtide.errors import AlreadyExists, InvalidRequest

ENDS = ("pem", "key", "token")
HOSTS = {
    "control": [Role.COORDINATOR],
    "relay": [Role.RELAY],
    "gateway": [Role.GATEWAY],
    "one": [Role.WORKER],
    "two": [Role.WORKER, Role.TRAINER],
    "admin": [Role.OPERATOR],
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    lay_out(folder, HOSTS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_host_gets_its_own_programs_papers_and_no_others(keys: Path) -> None:
    for host, roles in HOSTS.items():
        wanted = {"ca.pem", *(f"{FILES[role]}.{end}" for role in roles for end in ("pem", "key"))}
        wanted |= {f"{FILES[role]}.token" for role in roles if role is not Role.COORDINATOR}
        wanted |= {"tokens.pub"} if SERVERS & set(roles) else set()
        assert {path.name for path in (keys / "hosts" / host).iterdir()} == wanted
    files = contents(keys / "hosts")
    secret = [text for path, text in files.items() if path.endswith((".key", ".token"))]
    assert len(secret) == len(set(secret)), "no two programs have the same"
    assert not {(keys / name).read_bytes() for name in ("ca.key", "tokens.key")} & set(files.values())


def test_papers_say_who_a_program_is_and_only_servers_have_their_hosts_names(keys: Path) -> None:
    found = {one.name: one for one in certificates.read_all(keys)[0]}
    trusted = public_keys((keys / "tokens.pub").read_bytes(), field="keys")
    for host, roles in HOSTS.items():
        for role in roles:
            assert found[f"{host}-{role}"].roles == (role,)
            assert found[f"{host}-{role}"].hosts == ((host,) if role in SERVERS else ())
            if role is not Role.COORDINATOR:
                token = (keys / "hosts" / host / f"{FILES[role]}.token").read_text().strip()
                assert verify(token, trusted).role is role


def test_what_is_there_stays_and_further_hosts_join(keys: Path) -> None:
    before = contents(keys)
    (added,) = lay_out(keys, {"three": [Role.WORKER]})
    assert added == keys / "hosts" / "three"
    lay_out(keys, HOSTS)
    assert before.items() <= contents(keys).items()


def test_what_was_renewed_is_laid_out_again(keys: Path) -> None:
    certificates.renew(keys, "one-worker", days=0)
    lay_out(keys, {"one": [Role.WORKER]})
    for end in ("pem", "key"):
        laid = keys / "hosts" / "one" / f"rollout-worker.{end}"
        assert laid.read_bytes() == (keys / f"one-worker.{end}").read_bytes()


@pytest.mark.parametrize(("role", "lifetime_s"), [(Role.OPERATOR, 12 * 3600), (Role.WORKER, 90 * 86400)])
def test_a_token_near_its_end_is_issued_again(keys: Path, role: Role, lifetime_s: float) -> None:
    host = {Role.OPERATOR: "admin", Role.WORKER: "one"}[role]
    token, laid = keys / f"{host}-{role}.token", keys / "hosts" / host / f"{FILES[role]}.token"
    assert signing_keys.read_token(token).expires == pytest.approx(time.time() + lifetime_s, abs=60)
    short = signing_keys.issue(keys, role, run_id="", ttl_s=lifetime_s / 3 - 1, name="")
    signing_keys.put_token(token, short)
    lay_out(keys, HOSTS)
    assert signing_keys.read_token(token).expires == pytest.approx(time.time() + lifetime_s, abs=60)
    assert laid.read_bytes() == token.read_bytes()


def test_a_certificate_near_its_end_is_renewed_with_its_roles_and_hosts(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = certificates.read(keys, "relay-relay")
    monkeypatch.setattr(certificates.IssuedCertificate, "left", lambda one, _: one.lifetime / 3 - dt.timedelta(hours=1))
    lay_out(keys, {"relay": [Role.RELAY]})
    after = certificates.read(keys, "relay-relay")
    assert after.expires >= before.expires
    assert after._replace(expires=before.expires) == before
    assert (keys / "hosts/relay/weight-relay.pem").read_bytes() == (keys / "relay-relay.pem").read_bytes()


def test_a_role_that_a_host_no_longer_has_leaves_nothing_in_its_folder(keys: Path) -> None:
    (laid,) = lay_out(keys, {"two": [Role.WORKER]})
    assert {path.name for path in laid.iterdir()} == {"ca.pem", *(f"rollout-worker.{end}" for end in ENDS)}


@pytest.mark.parametrize("lost", ["one-worker.pem", "one-worker.key"])
def test_half_a_programs_pair_is_made_anew(keys: Path, lost: str) -> None:
    (keys / lost).unlink()
    lay_out(keys, HOSTS)
    assert certificates.read(keys, "one-worker").roles == (Role.WORKER,)


@pytest.mark.parametrize("half", ["ca.key", "tokens.pub"])
def test_half_an_authority_that_nobody_depends_on_is_made_anew(tmp_path: Path, half: str) -> None:
    """What is left when the first run is killed between two files."""
    lay_out(tmp_path / "whole", {})
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / half).write_bytes((tmp_path / "whole" / half).read_bytes())
    lay_out(tmp_path / "keys", HOSTS)
    public_keys((tmp_path / "keys/tokens.pub").read_bytes(), field="keys")
    assert not certificates.read_all(tmp_path / "keys")[1]


@pytest.mark.parametrize("lost", ["ca.pem", "tokens.key"])
def test_half_an_authority_that_others_depend_on_is_not_replaced(keys: Path, lost: str) -> None:
    (keys / lost).unlink()
    before = contents(keys)
    with pytest.raises(AlreadyExists):
        lay_out(keys, HOSTS)
    assert contents(keys) == before


def test_only_who_installs_reads_keys_and_tokens(keys: Path) -> None:
    assert not [path for end in ("key", "token") for path in keys.rglob(f"*.{end}") if path.stat().st_mode & 0o077]


def test_the_command_prints_what_goes_to_the_hosts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["certs", "hosts", "--dir", str(tmp_path), "a=relay", "b=worker"])
    assert done.exit_code == 0
    assert done.stdout.split() == [str(tmp_path / "hosts" / host) for host in "ab"]


def test_hosts_are_named_with_their_roles() -> None:
    assert parse_hosts(["a=worker,trainer", "b=relay"]) == {"a": (Role.WORKER, Role.TRAINER), "b": (Role.RELAY,)}
    with pytest.raises(InvalidRequest, match="twice"):
        parse_hosts(["a=worker", "a=trainer"])
    for word in ("a", "a=", "a=guard", "a=worker,", "a b=worker"):
        with pytest.raises(InvalidRequest, match="HOST=ROLE"):
            parse_hosts([word])
