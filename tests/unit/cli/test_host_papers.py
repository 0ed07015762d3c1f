"""Each host gets what its programs show and trust, and nothing of others."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.auth.role_tokens import public_keys, verify
from ebbtide.auth.roles import Role
from ebbtide.cli.__main__ import app
from ebbtide.cli.credentials import certificates
from ebbtide.cli.credentials.host_papers import FILES, SERVERS, lay_out, parse_hosts
from ebbtide.errors import InvalidRequest

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


def test_only_who_installs_reads_keys_and_tokens(keys: Path) -> None:
    assert not [path for end in ("key", "token") for path in keys.rglob(f"*.{end}") if path.stat().st_mode & 0o077]


def test_the_command_prints_what_goes_to_the_hosts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["certs", "hosts", "--dir", str(tmp_path), "a=relay", "b=worker"])
    assert done.exit_code == 0
    assert done.stdout.split() == [str(tmp_path / "hosts" / host) for host in "ab"]


def test_hosts_are_named_with_their_roles() -> None:
    assert parse_hosts(["a=worker,trainer", "b=relay"]) == {"a": (Role.WORKER, Role.TRAINER), "b": (Role.RELAY,)}
    for word in ("a", "a=", "a=guard", "a=worker,", "a b=worker"):
        with pytest.raises(InvalidRequest, match="HOST=ROLE"):
            parse_hosts([word])
