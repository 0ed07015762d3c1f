"""`ebbtide certs` and `ebbtide tokens` make what servers and clients take, overwrite nothing, and say what is wrong."""

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from ebbtide.auth.admission import admission_of
from ebbtide.auth.role_tokens import public_keys, verify
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.cli.__main__ import main
from ebbtide.types.session import KeyLimits

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command in an empty folder: its status, what it said, and what it complained of."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_what_is_issued_is_what_servers_and_clients_take(ask: Ask, tmp_path: Path) -> None:
    assert ask("certs", "init", "--dir", "ca")[0] == 0
    server = ("--role", "coordinator", "--name", "c", "--host", "10.0.0.1", "--host", "c.example")
    assert ask("certs", "issue", "--dir", "ca", *server)[:2] == (0, "ca/c.pem\n")
    assert ask("tokens", "key", "--dir", "keys")[:2] == (0, "keys/tokens.pub\n")
    assert ask("tokens", "issue", "--dir", "keys", "--role", "worker", "--out", "worker.jwt")[0] == 0
    pair = {"tls_ca": "ca/ca.pem", "tls_cert": "ca/c.pem", "tls_key": "ca/c.key"}
    settings = ServerSettings(listen="10.0.0.1:7600", token_keys="keys/tokens.pub", **pair)  # type: ignore[arg-type]
    assert settings.credentials() is not None
    bearer = ClientSecurity(token_file="worker.jwt").bearer()
    admission_of(settings).admit("/ebbtide.v1.Fleet/Control", [("authorization", bearer)])
    for secret in ("ca/ca.key", "ca/c.key", "keys/tokens.key", "worker.jwt"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0


def test_a_certificate_names_its_hosts_and_its_roles_and_cannot_sign_others(ask: Ask) -> None:
    ask("certs", "init", "--dir", "ca")
    ask("certs", "issue", "--dir", "ca", "--role", "worker", "--role", "relay", "--name", "w", "--host", "::1")
    made = x509.load_pem_x509_certificate(Path("ca/w.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["ebbtide:role:worker", "ebbtide:role:relay"]
    assert [str(found) for found in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = made.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(Path("ca/ca.pem").read_bytes()))


LIMITS = {
    "requests_per_minute": 60,
    "tokens_per_minute": 9000,
    "tokens": 10**6,
    "tokens_per_day": 10**5,
    "requests_at_once": 4,
}


def test_a_clients_key_of_one_run_carries_its_limits_and_shows_them(ask: Ask) -> None:
    ask("tokens", "key", "--dir", "keys")
    options = [word for name, most in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(most))]
    issue = ("tokens", "issue", "--dir", "keys", "--ttl", "1h", "--out", "a.jwt", *options)
    assert ask(*issue, "--role", "agent", "--run", "r-1", "--name", "team-a")[0] == 0
    trusted = public_keys(Path("keys/tokens.pub").read_bytes(), field="keys")
    claims = verify(Path("a.jwt").read_text().strip(), trusted)
    assert claims.limits == KeyLimits(**LIMITS)
    shown = ask("tokens", "show", "a.jwt")[1]
    assert "tokens per day 100,000" in shown
    told = json.loads(ask("tokens", "show", "a.jwt", "--json")[1])
    assert (told["role"], told["run_id"], told["name"], told["limits"]) == ("agent", "r-1", "team-a", LIMITS)
    assert dt.datetime.fromisoformat(told["expires"]) > dt.datetime.now(dt.UTC)
    for scope in (("--role", "agent"), ("--role", "user", "--run", "r-1")):
        status, _, complaint = ask(*issue, *scope)
        assert status != 0
        assert "--requests-per-minute: limits are for keys of role agent that are bound to a run" in complaint


def test_those_that_end_soon_are_renewed_and_the_list_says_when_they_do(ask: Ask) -> None:
    ask("certs", "init", "--dir", "ca")
    ask("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "soon", "--days", "3")
    ask("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "later", "--days", "300")
    assert ask("certs", "renew", "--dir", "ca", "--days", "90")[1] == "ca/soon.pem\n"
    assert ask("certs", "renew", "--dir", "ca") == (0, "", "none ends within 30 days\n")
    assert ask("certs", "renew", "--dir", "ca", "later")[1] == "ca/later.pem\n"
    _, listed, _ = ask("certs", "show", "--dir", "ca")
    assert "89 days" in next(line for line in listed.splitlines() if line.split()[0] == "soon")
    assert "299 days" in next(line for line in listed.splitlines() if line.split()[0] == "later")
    told = {one["name"]: one for one in json.loads(ask("certs", "show", "--dir", "ca", "--json")[1])}
    assert (told["soon"]["roles"], told["soon"]["hosts"], told["soon"]["lifetime"]) == (["worker"], [], 90 * 86400)
    assert dt.datetime.fromisoformat(told["soon"]["expires"]) < dt.datetime.fromisoformat(told["later"]["expires"])


def test_one_that_cannot_be_read_holds_up_none_of_the_others(ask: Ask) -> None:
    ask("certs", "init", "--dir", "ca")
    for name in ("a", "b", "c"):
        ask("certs", "issue", "--dir", "ca", "--role", "worker", "--name", name, "--days", "3")
    Path("ca/b.pem").write_text("torn")
    why = "ebbtide: ca/b.pem: is no certificate in PEM\n"
    status, listed, complaint = ask("certs", "show", "--dir", "ca")
    assert (status, complaint) == (2, why)
    assert [line.split()[0] for line in listed.splitlines()] == ["name", "ca", "a", "c"]
    assert ask("certs", "renew", "--dir", "ca") == (2, "ca/a.pem\nca/c.pem\n", why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("certs", "init", "--dir", "ca"), "has an authority already"),
        (("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "w"), "renew it, or take another name"),
        (("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "ca"), "names the authority itself"),
        (("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "../x"), "--name: must be"),
        (("certs", "issue", "--dir", "ca", "--role", "user", "--name", "x", "--host", "h:7600"), "without a port"),
        (
            ("certs", "issue", "--dir", "ca", "--role", "user", "--name", "x", "--days", "9999"),
            "outlives the authority",
        ),
        (("certs", "renew", "--dir", "ca", "ca"), "make another authority"),
        (("certs", "renew", "--dir", "ca", "nobody"), "nobody.pem: cannot be read"),
        (("certs", "show", "--dir", "nowhere"), "ebbtide certs init makes one"),
        (("tokens", "key", "--dir", "keys"), "--rotate adds another"),
        (("tokens", "issue", "--dir", "nowhere", "--role", "user"), "ebbtide tokens key makes one"),
        (
            ("tokens", "issue", "--dir", "keys", "--role", "operator", "--run", "r"),
            "only tokens of agent, gateway, trainer and user",
        ),
        (("tokens", "issue", "--dir", "keys", "--role", "user", "--run", "a b"), "run: must be"),
        (("tokens", "issue", "--dir", "keys", "--role", "user", "--ttl", "soon"), "--ttl: 'soon' is no duration"),
        (("tokens", "issue", "--dir", "keys", "--role", "user", "--ttl", "9999d"), "--ttl: is more than ten years"),
        (("tokens", "show", "ca/ca.pem"), "is no token of a role"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(ask: Ask, words: tuple[str, ...], why: str) -> None:
    ask("certs", "init", "--dir", "ca", "--days", "400")
    ask("certs", "issue", "--dir", "ca", "--role", "worker", "--name", "w")
    ask("tokens", "key", "--dir", "keys")
    status, _, complaint = ask(*words)
    assert status in {1, 2}
    assert why in complaint


def test_a_token_tells_what_it_is_for(ask: Ask) -> None:
    ask("tokens", "key", "--dir", "keys")
    _, token, _ = ask("tokens", "issue", "--dir", "keys", "--role", "trainer", "--run", "my-run", "--name", "t1")
    Path("t1.jwt").write_text(token)
    _, told, _ = ask("tokens", "show", "t1.jwt")
    assert [line.split()[:2] for line in told.splitlines()][:3] == [
        ["role", "trainer"],
        ["run", "my-run"],
        ["name", "t1"],
    ]


def test_neither_keys_nor_anything_else_is_overwritten(ask: Ask, tmp_path: Path) -> None:
    ask("certs", "init", "--dir", "both")
    ask("tokens", "key", "--dir", "both")
    key = (tmp_path / "both/tokens.key").read_bytes()
    status, _, why = ask("certs", "issue", "--dir", "both", "--role", "worker", "--name", "tokens")
    assert status == 1
    assert "has a tokens.key already" in why
    status, _, why = ask("tokens", "issue", "--dir", "both", "--role", "worker", "--out", "both/tokens.key")
    assert status == 1
    assert "holds no signed token" in why
    assert (tmp_path / "both/tokens.key").read_bytes() == key
    (tmp_path / "both/tokens.key").unlink()
    public = (tmp_path / "both/tokens.pub").read_bytes()
    status, _, why = ask("tokens", "key", "--dir", "both")
    assert status == 1
    assert "tokens.pub" in why
    assert (tmp_path / "both/tokens.pub").read_bytes() == public


def test_a_token_is_put_in_the_place_of_a_former_one(ask: Ask, tmp_path: Path) -> None:
    ask("tokens", "key", "--dir", "keys")
    for role in ("worker", "relay"):
        assert ask("tokens", "issue", "--dir", "keys", "--role", role, "--out", "a.jwt")[0] == 0
    assert "relay" in ask("tokens", "show", "a.jwt")[1]


@pytest.mark.parametrize("words", [("certs", "init"), ("tokens", "key")])
def test_a_folder_that_cannot_be_made_is_named(ask: Ask, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        status, _, why = ask(*words, "--dir", folder)
        assert status == 2
        assert f"--dir: {folder} cannot be made" in why
