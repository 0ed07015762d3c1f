"""A gateway never walks all of its objects while it runs, and what is over in it is freed without that."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import NoCapacity
from ebbtide.gateway.service import serve
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.runtime import Shutdown
from ebbtide.types.rollout import FinishReason
from tests.fakes import cycles as fakes
from tests.fakes.asgi_call import AsgiCall
from tests.fakes.scripted_rollouts import ScriptedSource
from tests.support.waiting import wait_until
from tests.unit.gateway.http.conftest import HEADERS

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_tokens": 30,
}


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    with fakes.no_collector():
        yield


def cycles() -> Counter[str]:
    """What of the gateway nothing refers to, except itself."""
    return fakes.cycles(("ebbtide.",), "services/ebbtide/gateway")


async def finish(app: Starlette, _: ScriptedSource, **more: Any) -> None:
    await AsgiCall(app, CHAT, BODY | more, HEADERS).task


async def refuse(app: Starlette, source: ScriptedSource) -> None:
    await AsgiCall(app, CHAT, BODY | {"n": 0}, HEADERS).task
    await AsgiCall(app, "/tokenize", {"prompt": 5}, HEADERS).task
    await AsgiCall(app, CHAT, BODY, {}).task
    source.refusal = NoCapacity("no room")
    await AsgiCall(app, CHAT, BODY | {"stream": True}, HEADERS).task
    source.refusal = None


async def break_off(app: Starlette, source: ScriptedSource) -> None:
    source.break_off = FinishReason.DEAD_LETTERED
    await finish(app, source)
    await finish(app, source, stream=True, n=2)
    source.break_off = None


async def leave(app: Starlette, source: ScriptedSource) -> None:
    source.gate.clear()
    source.first.clear()
    call = AsgiCall(app, CHAT, BODY | {"stream": True, "n": 2}, HEADERS)
    await source.first.wait()
    call.leave()
    await call.task
    source.gate.set()


async def test_requests_that_are_over_leave_no_cycle(
    app: Starlette, source: ScriptedSource, no_collector: None
) -> None:
    async def each() -> None:
        await finish(app, source)
        await finish(app, source, stream=True)
        await finish(app, source, stream=True, n=3)
        await refuse(app, source)
        await break_off(app, source)
        await leave(app, source)
        await asyncio.sleep(0)

    await each()  # what is made once is no leak
    cycles()
    for _ in range(8):
        await each()
    assert cycles() == {}


async def test_a_gateway_sets_its_old_objects_aside(collector: None) -> None:
    settings = GatewaySettings(
        listen="127.0.0.1:0", coordinator="127.0.0.1:1", security=ClientSecurity(token="a token")
    )
    shutdown = Shutdown("gateway", settings)
    serving = asyncio.create_task(serve(shutdown, settings))
    try:
        await wait_until(gc.get_freeze_count, timeout=20, what="objects set aside")
        assert gc.get_threshold()[2] > 1_000_000, "Python itself never walks all objects"
    finally:
        shutdown.requested.set()
        await serving
        await shutdown.close()
