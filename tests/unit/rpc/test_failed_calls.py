"""A failed call and its error are no cycle: what the call held is freed at once."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from ebbtide.auth.admission import admission_of
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import NoCapacity
from ebbtide.rpc.server import Gate


class Request:
    """A large one."""


class Context:
    """Keeps the error that it aborts with, as gRPC does."""

    error: BaseException | None = None

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    async def abort(self, *_: Any) -> None:
        await asyncio.sleep(0)
        self.error = grpc.aio.AbortError("Locally aborted.")
        raise self.error


class Details:
    method = "/ebbtide.v1.Rollouts/Submit"

    def __init__(self, token: str) -> None:
        self.invocation_metadata = (("authorization", f"Bearer {token}"),)


async def unary(request: Any, context: Any) -> None:
    raise NoCapacity("full", retry_after_s=1.0)


async def stream(request: Any, context: Any) -> AsyncIterator[int]:
    yield 1
    raise NoCapacity("full", retry_after_s=1.0)


async def read(answers: AsyncIterator[int]) -> None:
    async for _ in answers:
        pass


@pytest.mark.parametrize("token", ["t", "wrong"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_failed_call_is_freed_with_its_request(kind: str, token: str) -> None:
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    inner = make(unary if kind == "unary_unary" else stream)

    async def continuation(details: Any) -> Any:
        return inner

    gate = Gate(admission_of(ServerSettings(token="t")), max_unary_s=9.0)
    handler: Any = await gate.intercept_service(continuation, cast("Any", Details(token)))
    behaviour = getattr(handler, kind)

    async def call() -> list["weakref.ref[Any]"]:
        request, context = Request(), Context()
        seen: list[weakref.ref[Any]] = [weakref.ref(request), weakref.ref(context)]
        answer = behaviour(request, context)
        del request, context  # the error refers to this frame, too
        with pytest.raises(grpc.aio.AbortError):
            await (read(answer) if hasattr(answer, "__aiter__") else answer)
        return seen

    gc.disable()
    try:
        seen = await call()
        await asyncio.sleep(0)
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
