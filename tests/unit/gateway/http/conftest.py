"""A gateway's application over scripted rollouts, and clients of it."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.security import TokenCheck
from ebbtide.gateway.access import KeyRing, RequestLimits, SessionLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.route import AppState
from ebbtide.gateway.request import Prompt
from ebbtide.gateway.request_player import RequestPlayer
from ebbtide.gateway.templates import TemplateSandbox
from tests.fakes.scripted_app_state import scripted_app_state
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource, scripted_model, scripted_run

SECRET = "the-shared-secret"
HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture
def source(sandbox: TemplateSandbox) -> ScriptedSource:
    return ScriptedSource(scripted_run(), scripted_model(sandbox, tools=True))


@pytest.fixture
def limits() -> RequestLimits:
    return RequestLimits(body_bytes=64 << 10, prompt_tokens=200, messages=20, tools=4)


@pytest.fixture
def catalog(source: ScriptedSource) -> ScriptedCatalog:
    return ScriptedCatalog([source])


@pytest.fixture
def session_limits() -> SessionLimits:
    return SessionLimits(turns=6, per_key=5)


@pytest.fixture
def state(catalog: ScriptedCatalog, limits: RequestLimits, session_limits: SessionLimits) -> AppState:
    check = TokenCheck(f"Bearer {SECRET}")
    return scripted_app_state(catalog, KeyRing(ReloadedFiles((), lambda: check), None), limits, session_limits)


@pytest.fixture
def app(state: AppState) -> Starlette:
    return make_app(state)


@pytest.fixture
async def http(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=HEADERS) as client:
        yield client


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Prompts are encoded while it is set."""
    gate, encoded = asyncio.Event(), RequestPlayer.encoded
    gate.set()

    async def gated(player: RequestPlayer, prompt: Prompt, field: str, owner: str) -> list[int]:
        await gate.wait()
        return await encoded(player, prompt, field, owner)

    monkeypatch.setattr(RequestPlayer, "encoded", gated)
    return gate
