"""Which keys are admitted to what."""

import asyncio
import base64
import time
from typing import Any

import httpx
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.applications import Starlette

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.role_tokens import key_id, mint
from ebbtide.auth.roles import TABLE, Role
from ebbtide.auth.security import TokenCheck
from ebbtide.errors import BudgetSpent, RateLimited
from ebbtide.gateway.access import KeyRing
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState
from ebbtide.types.ids import check_id
from ebbtide.types.run import EnvironmentSpec
from ebbtide.types.session import KeyLimits, MeteredKey
from tests.fakes.asgi_call import AsgiCall
from tests.fakes.clocks import SetClock
from tests.fakes.scripted_app_state import scripted_directory
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import HEADERS

SIGNER = Ed25519PrivateKey.generate()
BODY = {"prompt": "x"}


def token(role: Role, **claims: Any) -> str:
    return mint(SIGNER, role, ttl_s=60, **claims)


@pytest.fixture
def signed_app(state: AppState) -> Starlette:
    known = {key_id(SIGNER.public_key()): SIGNER.public_key()}
    return make_app(msgspec.structs.replace(state, keys=KeyRing(None, ReloadedFiles((), lambda: known))))


async def ask(app: Starlette, method: str, url: str, key: str, *, header: str = "authorization") -> httpx.Response:
    shown = f"Bearer {key}" if header == "authorization" else key
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return await client.request(method, url, headers={header: shown}, json=BODY if method == "POST" else None)


def test_an_agents_token_may_call_no_service() -> None:
    assert not any(Role.AGENT in roles for roles in TABLE.values())


@pytest.mark.parametrize("role", list(Role))
async def test_some_roles_may_ask_for_text(signed_app: Starlette, role: Role) -> None:
    asked = await ask(signed_app, "POST", "/v1/completions", token(role))
    asks = role in (Role.AGENT, Role.USER, Role.TRAINER, Role.OPERATOR)
    assert asked.status_code == (200 if asks else 403)


async def test_either_header_carries_a_key(signed_app: Starlette) -> None:
    assert (await ask(signed_app, "POST", "/v1/completions", token(Role.AGENT), header="x-api-key")).status_code == 200
    for wrong in ("", "ey.a.b", "x" * 9000, mint(Ed25519PrivateKey.generate(), Role.USER, ttl_s=60)):
        assert (await ask(signed_app, "POST", "/v1/completions", wrong)).status_code == 401


async def test_a_password_carries_a_key_for_clients_that_read_netrc_files(signed_app: Starlette) -> None:
    async def basic(credentials: str | bytes) -> int:
        shown = base64.b64encode(credentials if isinstance(credentials, bytes) else credentials.encode()).decode()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
            return (
                await client.post("/v1/completions", headers={"authorization": f"Basic {shown}"}, json=BODY)
            ).status_code

    assert await basic(f"anybody:{token(Role.AGENT)}") == 200
    for wrong in (token(Role.AGENT), f"{token(Role.AGENT)}:", "a:b", "", b"\xff:\xff", "a:" + "x" * 9000):
        assert await basic(wrong) == 401
    async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
        assert (await client.get("/v1/models", headers={"authorization": "Basic !"})).status_code == 401


async def test_a_key_of_another_run_finds_nothing(signed_app: Starlette) -> None:
    assert (await ask(signed_app, "POST", "/v1/completions", token(Role.AGENT, run_id="other-1"))).status_code == 404
    models = (await ask(signed_app, "GET", "/v1/models", token(Role.AGENT, run_id="other-1"))).json()
    assert models["data"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/sessions/s/v1/completions"])
async def test_a_keys_limits_go_with_its_requests(signed_app: Starlette, source: ScriptedSource, path: str) -> None:
    limits = KeyLimits(tokens=1000)
    key = token(Role.AGENT, run_id="spell-1", name="team-a", limits=limits)
    assert (await ask(signed_app, "POST", path, key)).status_code == 200
    assert source.metered == [MeteredKey(owner="name.agent.team-a", limits=limits)]
    source.used["name.agent.team-a"] = 12
    usage = (await ask(signed_app, "GET", "/v1/usage", key)).json()
    assert (usage["tokens"], usage["limits"]) == (12, {"tokens": 1000})
    assert (await ask(signed_app, "POST", path, token(Role.AGENT))).status_code == 200
    assert len(source.metered) == 1, "a key without limits has no account"


async def test_a_key_with_a_limit_that_is_not_known_here_is_refused(signed_app: Starlette) -> None:
    for limits in ({"sessions": 1}, {"tokens": -1}, {"tokens": "x"}, [1]):
        now = int(time.time())
        claims = {"iss": "ebbtide", "aud": "ebbtide", "role": "agent", "iat": now, "exp": now + 60, "limits": limits}
        headers = {"kid": key_id(SIGNER.public_key()), "typ": "ebbtide+jwt"}
        key = jwt.encode(claims, SIGNER, "EdDSA", headers=headers)
        assert (await ask(signed_app, "POST", "/v1/completions", key)).status_code == 401


CHAT = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_key_at_a_limit_is_told_so_as_its_client_reads_it(
    signed_app: Starlette, source: ScriptedSource, path: str
) -> None:
    body = CHAT if path == "/v1/messages" else BODY
    told = []
    for refusal in (RateLimited("slow down", retry_after_s=2.2), BudgetSpent("used up", retry_after_s=0.0)):
        source.refusal = refusal
        async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
            told.append(await client.post(path, json=body, headers={"x-api-key": token(Role.AGENT)}))
    limited, spent = told
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "3")
    assert (spent.status_code, spent.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in spent.headers
    if path == "/v1/messages":
        assert {one.json()["error"]["type"] for one in told} == {"rate_limit_error"}
    else:
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert (spent.json()["error"]["type"], spent.json()["error"]["code"]) == ("insufficient_quota",) * 2


async def test_a_turn_beyond_a_budget_is_not_stored(signed_app: Starlette, source: ScriptedSource) -> None:
    key = token(Role.AGENT, run_id="spell-1", limits=KeyLimits(tokens=5))
    assert (await ask(signed_app, "POST", "/sessions/s/v1/completions", key)).status_code == 429
    assert [turns for _, turns in source.stored.values()] == [[]]


async def test_requests_of_two_users_never_meet(signed_app: Starlette, source: ScriptedSource) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
        for name in ("alice", "bob"):
            headers = {"authorization": f"Bearer {token(Role.AGENT, name=name)}", "x-request-id": "same"}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert len(source.submitted) == 2


def owner(key: str) -> str:
    """Of what is asked for under a key, of which the shared secret is `operator`."""
    known = {key_id(SIGNER.public_key()): SIGNER.public_key()}
    shared = TokenCheck("Bearer operator")
    ring = KeyRing(ReloadedFiles((), lambda: shared), ReloadedFiles((), lambda: known))
    return ring.admit({"x-api-key": key}).owner


def test_each_key_without_a_name_is_an_owner_of_its_own() -> None:
    first = token(Role.AGENT)
    assert owner(first) == owner(first)
    assert owner(first) != owner(token(Role.AGENT))


def test_a_renewed_key_of_the_same_name_has_the_same_owner() -> None:
    for name in ("team-a", "n" * 128):
        assert owner(token(Role.AGENT, name=name)) == owner(token(Role.AGENT, name=name))


def test_names_roles_and_the_shared_secret_never_meet() -> None:
    names = ("agent", "operator", "shared-secret", "name.agent.x", "x", "n" * 128, "n" * 127 + "m")
    named = [owner(token(role, name=name)) for name in names for role in (Role.AGENT, Role.USER)]
    owners = [*named, owner(token(Role.AGENT)), owner("operator")]
    assert len(set(owners)) == len(owners)
    assert all(check_id(one, field="owner") for one in owners)


AGENT = {"name": "team-a", "run_id": "spell-1"}
CHEATS = [
    ("GET", "/v1/sessions", None),
    ("POST", "/v1/sessions", {"session_id": "mine"}),
    ("GET", "/v1/sessions/mine", None),
    ("GET", "/v1/sessions/mine/completions", None),
    ("POST", "/v1/sessions/mine/reward", {"reward": 1.0}),
    ("POST", "/v1/sessions/mine/end", {"verifier": "exact", "data": {"answer": "x"}}),
    ("POST", "/v1/sessions/mine/end", {"drop_reason": "bad"}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHEATS)
async def test_an_agent_cannot_reward_or_read_itself_or_a_neighbour(
    signed_app: Starlette, source: ScriptedSource, method: str, path: str, body: Any
) -> None:
    source.run = msgspec.structs.replace(
        source.run, spec=msgspec.structs.replace(source.run.spec, environment=EnvironmentSpec(name="agents"))
    )
    transport = httpx.ASGITransport(signed_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        harness = {"authorization": f"Bearer {token(Role.USER, **AGENT)}"}
        agent = {"authorization": f"Bearer {token(Role.AGENT, **AGENT)}"}
        opened = await client.post("/v1/sessions", json={"session_id": "mine", "group_id": "g"}, headers=harness)
        assert opened.status_code == 200
        assert (await client.post("/sessions/mine/v1/completions", json=BODY, headers=agent)).status_code == 200
        for session in ("mine", "neighbour"):
            hacked = await client.request(method, path.replace("mine", session), json=body, headers=agent)
            assert (hacked.status_code, hacked.json()["error"]["type"]) == (403, "permission_error")
        assert not source.trajectories
        trace = (await client.get("/v1/sessions/mine", headers=harness)).json()
        assert [len(turn["completions"]) for turn in trace["turns"]] == [1], "its owner's other key has what it played"
        ended = await client.post("/v1/sessions/mine/reward", json={"reward": 0.5}, headers=harness)
        assert (ended.status_code, ended.json()["reward"]) == (200, 0.5)


async def test_a_key_of_one_session_plays_no_other_and_moves_it_into_no_group(
    signed_app: Starlette, source: ScriptedSource
) -> None:
    bound = {"authorization": f"Bearer {token(Role.AGENT, session_id='mine', **AGENT)}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
        for headers in ({"x-session-id": "other"}, {"x-group-id": "easy", "x-session-id": "mine"}):
            refused = await client.post("/v1/completions", json=BODY, headers=bound | headers)
            assert refused.status_code == 403
        assert (await client.post("/sessions/other/v1/completions", json=BODY, headers=bound)).status_code == 403
        assert not source.stored
        assert (await client.post("/v1/completions", json=BODY, headers=bound)).status_code == 200, "its session alone"
        assert (await client.post("/v1/completions", json=BODY, headers=bound | {"x-session-id": "mine"})).is_success
        harness = {"authorization": f"Bearer {token(Role.OPERATOR, name='team-a')}"}
        page = (await client.get("/v1/sessions", headers=harness)).json()
        assert [(one["id"], one["turn_count"]) for one in page["data"]] == [("mine", 2)]


async def test_a_key_of_a_session_that_could_stand_in_no_path_plays_none(
    signed_app: Starlette, source: ScriptedSource
) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
        for session in ("a/b", "s" * 257, "é"):
            key = {"authorization": f"Bearer {token(Role.AGENT, session_id=session, **AGENT)}"}
            refused = await client.post("/v1/completions", json=BODY, headers=key)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Session-ID")
    assert not source.stored


@pytest.mark.parametrize(("role", "status"), [(Role.AGENT, 403), (Role.USER, 200)])
async def test_an_agents_key_goes_before_no_other(signed_app: Starlette, role: Role, status: int) -> None:
    key = {"authorization": f"Bearer {token(role)}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(signed_app), base_url="http://gateway") as client:
        for priority, wanted in ((-1, status), (0, 200), (5, 200)):
            asked = await client.post("/v1/completions", json=BODY | {"priority": priority}, headers=key)
            assert asked.status_code == wanted


async def test_models_tell_their_context_and_version(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["weight_version"]) == ("spell-1", 512, 3)
    assert (await http.get("/v1/models/spell")).json() == card
    assert (await http.get("/v1/models/none")).status_code == 404


async def test_the_run_says_what_it_serves(http: httpx.AsyncClient) -> None:
    info = (await http.get("/server_info")).json()
    engine = info.pop("vllm_config")
    assert (engine["lora_config"], engine["weight_transfer_config"]) == (None, None)
    assert info == {"run_id": "spell-1", "model": info["model"], "weight_version": 3}
    assert (await http.get("/get_world_size")).json() == {"world_size": 2}


async def test_health_needs_no_key_and_follows_the_gateway(state: AppState, http: httpx.AsyncClient) -> None:
    bare = {"authorization": ""}
    assert (await http.get("/health", headers=bare)).status_code == 503
    await state.directory.refresh()
    assert (await http.get("/health", headers=bare)).status_code == 200
    leaving = make_app(msgspec.structs.replace(state, is_leaving=lambda: True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(leaving), base_url="http://gateway") as client:
        assert (await client.get("/health")).status_code == 503
        answer = await client.post("/v1/completions", json=BODY, headers=HEADERS)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_a_request_that_waits_keeps_its_run_open(
    state: AppState, catalog: ScriptedCatalog, source: ScriptedSource, encoding: asyncio.Event
) -> None:
    clock = SetClock(100.0)
    directory = scripted_directory(catalog, idle_s=60, clock=clock)
    state = msgspec.structs.replace(state, directory=directory)
    encoding.clear()
    call = AsgiCall(make_app(state), "/v1/completions", BODY, HEADERS)
    await wait_until(lambda: bool(catalog.opened))
    for _ in range(50):
        await asyncio.sleep(0)
    clock.now += 61
    await directory.refresh()
    assert not source.released
    encoding.set()
    await call.task
    assert call.status == 200
    clock.now += 59
    await directory.refresh()
    assert not source.released
    clock.now += 2
    await directory.refresh()
    await wait_until(lambda: source.released)
