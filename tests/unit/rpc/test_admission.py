"""What decides about a call: the secret that is shared, signed tokens, and which settings make sense together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ebbtide.auth.admission import Admission, admission_of, caller_name, check_claim, is_among_peers
from ebbtide.auth.credential_files import roles_of_peer
from ebbtide.auth.role_tokens import SKEW_S, key_id, mint, public_keys, signing_key, unverified, verify
from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.cli.credentials import signing_keys
from ebbtide.errors import AlreadyExists, InvalidRequest, PermissionDenied, Unauthenticated
from tests.support.waiting import wait_until

GET, CLAIM, LIST, CONTROL = (
    f"/ebbtide.v1.{name}" for name in ("Runs/GetRun", "Runs/ClaimRun", "Runs/ListRuns", "Fleet/Control")
)
KEY = Ed25519PrivateKey.generate()
KEYS = {key_id(KEY.public_key()): KEY.public_key()}


def bearing(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "tokens.pub"
    path.write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(path)


def test_a_token_says_role_run_and_name_to_who_has_the_public_key() -> None:
    claims = verify(mint(KEY, Role.TRAINER, ttl_s=60, run_id="run-a", name="t1"), KEYS)
    assert (claims.role, claims.run_id, claims.name) == (Role.TRAINER, "run-a", "t1")
    assert unverified(mint(KEY, Role.USER, ttl_s=60)).run_id == ""


@pytest.mark.parametrize(
    "change",
    [
        {"aud": "other"},
        {"iss": "other"},
        {"role": "boss"},
        {"exp": None},
        {"role": None},
        {"iat": 1 << 40},
        {"aud": None},
        {"run": ""},
        {"run": ["run-a"]},
        {"exp": 10**400},
    ],
)
def test_what_was_signed_for_something_else_is_no_token(change: dict[str, Any]) -> None:
    good = jwt.decode(mint(KEY, Role.USER, ttl_s=60), options={"verify_signature": False})
    claims = {name: value for name, value in (good | change).items() if value is not None}
    headers = {"kid": next(iter(KEYS)), "typ": "ebbtide+jwt"}
    assert verify(jwt.encode(good, KEY, "EdDSA", headers=headers), KEYS).role is Role.USER
    with pytest.raises(Unauthenticated, match="ebbtide tokens issue"):
        verify(jwt.encode(claims, KEY, "EdDSA", headers=headers), KEYS)
    with pytest.raises(Unauthenticated, match="ask for a new one"):
        verify(jwt.encode(good, KEY, "EdDSA", headers=headers | {"typ": "JWT"}), KEYS)


def test_a_public_key_is_no_secret_to_sign_with() -> None:
    public = KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    good = jwt.decode(mint(KEY, Role.USER, ttl_s=60), options={"verify_signature": False})
    forged = jwt.encode(good, public, "HS256", headers={"kid": next(iter(KEYS)), "typ": "ebbtide+jwt"})
    with pytest.raises(Unauthenticated):
        verify(forged, KEYS)


async def test_a_token_is_refused_once_it_has_expired_however_often_it_was_good(keys: str) -> None:
    admission = admission_of(ServerSettings(token_keys=keys))
    metadata = bearing(mint(KEY, Role.USER, ttl_s=3 - SKEW_S))
    admission.admit(GET, metadata)

    def refused() -> bool:
        try:
            admission.admit(GET, metadata)
        except Unauthenticated as error:
            return "has expired" in str(error)
        return False

    assert not refused()
    await wait_until(refused, 10)


def test_a_server_with_keys_takes_the_shared_secret_only_where_that_is_set_too(keys: str) -> None:
    with pytest.raises(Unauthenticated, match="EBBTIDE_TOKEN"):
        admission_of(ServerSettings(token_keys=keys)).admit(GET, bearing("secret"))
    both = admission_of(ServerSettings(token_keys=keys, token="secret"))
    both.admit(CLAIM, bearing("secret"))
    both.admit(GET, bearing(mint(KEY, Role.USER, ttl_s=60)))
    with pytest.raises(PermissionDenied, match="ClaimRun is for gateway or trainer"):
        both.admit(CLAIM, bearing(mint(KEY, Role.USER, ttl_s=60)))


def test_a_programs_own_signed_token_is_no_secret_for_others(keys: str) -> None:
    """A relay's token, read from the environment that its server shares with its calls upstream."""
    own = mint(KEY, Role.RELAY, ttl_s=60)
    admission = admission_of(ServerSettings(token_keys=keys, token=own))
    with pytest.raises(PermissionDenied):
        admission.admit(CLAIM, bearing(own))
    with pytest.raises(InvalidRequest, match="EBBTIDE_TOKEN_KEYS"):
        admission_of(ServerSettings(token=own))
    assert ClientSecurity(token=own).bearer() == f"Bearer {own}"


def test_a_signed_token_that_takes_the_secrets_place_in_its_file_is_no_secret(keys: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    admission = admission_of(ServerSettings(token_keys=keys, token_file=str(file)))
    admission.admit(CLAIM, bearing("secret"))
    own = mint(KEY, Role.RELAY, ttl_s=60)
    file.write_text(own)
    for token in (own, "secret"):
        with pytest.raises((PermissionDenied, Unauthenticated)):
            admission.admit(CLAIM, bearing(token))
    file.write_text("another secret")
    admission.admit(CLAIM, bearing("another secret"))


def test_a_server_that_could_tell_nobody_from_anybody_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="EBBTIDE_TOKEN_FILE, or EBBTIDE_TOKEN_KEYS"):
        admission_of(ServerSettings())


def test_a_token_of_one_run_is_refused_before_a_request_that_could_name_none_is_read(keys: str) -> None:
    from ebbtide.v1 import runs_pb2  # noqa: F401 - as every server of the method has: its descriptor is looked at

    admission = admission_of(ServerSettings(token_keys=keys))
    mine = bearing(mint(KEY, Role.USER, ttl_s=60, run_id="run-a"))
    admission.admit(GET, mine)
    admission.admit("/grpc.health.v1.Health/Check", mine)
    with pytest.raises(PermissionDenied, match="names none"):
        admission.admit(LIST, mine)


def test_the_texts_of_refusals_tell_no_other_run(keys: str) -> None:
    from ebbtide.v1.runs_pb2 import GetRunRequest

    admission = admission_of(ServerSettings(token_keys=keys))
    metadata = bearing(mint(KEY, Role.USER, ttl_s=60, run_id="run-a"))
    context = SimpleNamespace(invocation_metadata=lambda: metadata)
    assert admission.checked(GET, GetRunRequest(run_id="run-a"), context).run_id == "run-a"
    with pytest.raises(PermissionDenied, match="for another run") as refused:
        admission.checked(GET, GetRunRequest(run_id="run-b"), context)
    assert "run-a" not in str(refused.value)
    assert "run-b" not in str(refused.value)


def test_the_name_of_the_caller_is_that_in_the_token(keys: str) -> None:
    admission = admission_of(ServerSettings(token_keys=keys))
    for name in ("ann", ""):
        metadata = bearing(mint(KEY, Role.USER, ttl_s=60, name=name))
        admission.checked(LIST, "request", SimpleNamespace(invocation_metadata=lambda given=metadata: given))
        assert caller_name() == name


@pytest.mark.parametrize(("role", "leases"), [(Role.TRAINER, {"trainer", "driver"}), (Role.GATEWAY, {"gateway"})])
def test_a_caller_claims_the_leases_of_its_own_role_alone(keys: str, role: Role, leases: set[str]) -> None:
    metadata = bearing(mint(KEY, role, ttl_s=60))
    admission_of(ServerSettings(token_keys=keys)).checked(
        CLAIM, "request", SimpleNamespace(invocation_metadata=lambda: metadata)
    )
    for lease in ("trainer", "driver", "gateway"):
        if lease in leases:
            check_claim(lease)
            continue
        with pytest.raises(PermissionDenied, match=f"role {role}, which takes no {lease} lease"):
            check_claim(lease)


def test_a_certificate_of_a_role_narrows_the_shared_secret_and_one_without_does_not() -> None:
    admission = Admission(admission_of(ServerSettings(token="t"))._shared, certificates=True)

    def context(*uris: bytes) -> Any:
        return SimpleNamespace(invocation_metadata=lambda: bearing("t"), auth_context=lambda: {"peer_uri": uris})

    assert admission.checked(CONTROL, "request", context(b"ebbtide:role:worker")) == "request"
    assert admission.checked(CLAIM, "request", context()) == "request"
    assert admission.checked(CLAIM, "request", context(b"spiffe://elsewhere")) == "request"
    for uri in (b"ebbtide:role:worker", b"ebbtide:role:emperor"):
        with pytest.raises(PermissionDenied, match="ClaimRun is for gateway or trainer"):
            admission.checked(CLAIM, "request", context(uri))


def test_with_the_shared_secret_the_certificate_tells_whether_workers_may_be_sent_to_the_caller() -> None:
    admission = Admission(admission_of(ServerSettings(token="t"))._shared, certificates=True)
    find = "/ebbtide.v1.Weights/FindWay"
    for names, peer in [([], True), ([b"worker"], True), ([b"relay"], True), ([b"user"], False), ([b"trainer"], False)]:
        uris = [b"ebbtide:role:" + name for name in names]
        context = SimpleNamespace(
            invocation_metadata=lambda: bearing("t"), auth_context=lambda uris=uris: {"peer_uri": uris}
        )
        admission.checked(find, "request", context)
        assert is_among_peers() is peer, names


def test_the_roles_of_a_certificate_are_those_that_are_known() -> None:
    assert roles_of_peer({}) is None
    assert roles_of_peer({"peer_uri": [b"ebbtide:role:user", b"ebbtide:role:worker"]}) == frozenset(
        {Role.USER, Role.WORKER}
    )
    assert roles_of_peer({"peer_uri": [b"ebbtide:role:emperor"]}) == frozenset()


def test_servers_are_given_public_keys_alone(tmp_path: Path) -> None:
    signing_keys.make(tmp_path)
    private = (tmp_path / "tokens.key").read_bytes()
    with pytest.raises(InvalidRequest, match=r"token_keys: .*private key"):
        admission_of(ServerSettings(token_keys=str(tmp_path / "tokens.key")))
    with pytest.raises(InvalidRequest, match="no public key"):
        public_keys(b"-----BEGIN CERTIFICATE-----", field="token_keys")
    with pytest.raises(InvalidRequest, match="no Ed25519 private key"):
        signing_key((tmp_path / "tokens.pub").read_bytes(), field="key")
    assert signing_key(private, field="key").public_key()
    assert (tmp_path / "tokens.key").stat().st_mode & 0o077 == 0


def test_a_signing_key_is_not_overwritten_and_only_work_on_one_run_is_bound_to_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ebbtide tokens key"):
        signing_keys.issue(tmp_path, Role.USER, run_id="", ttl_s=60, name="")
    signing_keys.make(tmp_path)
    with pytest.raises(AlreadyExists, match="--rotate"):
        signing_keys.make(tmp_path)
    with pytest.raises(InvalidRequest, match="a worker works on all runs"):
        signing_keys.issue(tmp_path, Role.WORKER, run_id="run-a", ttl_s=60, name="")
    token = signing_keys.issue(tmp_path, Role.TRAINER, run_id="run-a", ttl_s=60, name="t1")
    assert verify(token, public_keys((tmp_path / "tokens.pub").read_bytes(), field="keys")).run_id == "run-a"


def test_a_session_binds_an_agents_key_of_a_name_alone(tmp_path: Path) -> None:
    signing_keys.make(tmp_path)
    for role, name in ((Role.USER, "team"), (Role.AGENT, "")):
        with pytest.raises(InvalidRequest) as refused:
            signing_keys.issue(tmp_path, role, run_id="", ttl_s=60, name=name, session_id="episode 1")
        assert refused.value.field == "--session"
    for session in ("a/b", "s" * 257, "é", "a\nb"):
        with pytest.raises(InvalidRequest) as refused:
            signing_keys.issue(tmp_path, Role.AGENT, run_id="", ttl_s=60, name="team", session_id=session)
        assert refused.value.field == "--session"
    token = signing_keys.issue(tmp_path, Role.AGENT, run_id="", ttl_s=60, name="team", session_id="episode 1")
    keys = public_keys((tmp_path / "tokens.pub").read_bytes(), field="token_keys")
    assert verify(token, keys).session_id == "episode 1"
