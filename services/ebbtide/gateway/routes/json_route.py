"""Serves routes that answer one JSON object and generate nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from ebbtide.errors import Unavailable
from ebbtide.gateway.access import ClientKey
from ebbtide.gateway.dialects.dialect import ErrorShape, openai_error
from ebbtide.gateway.metrics import REQUESTS
from ebbtide.gateway.routes.body_reader import read_body
from ebbtide.gateway.routes.error_replies import as_told
from ebbtide.gateway.routes.gateway_doors import AppState
from ebbtide.gateway.routes.http_reply import HttpReply
from ebbtide.types.ids import new_fence


class JsonCall(Struct, frozen=True, kw_only=True):
    """One call of such a route. `body` is empty unless the route reads one."""

    key: ClientKey
    body: Mapping[str, Any]
    query: Mapping[str, str]
    path: Mapping[str, str]


class JsonRoute:
    """An ASGI application."""

    def __init__(
        self,
        doors: AppState,
        work: Callable[[JsonCall], Awaitable[Any]],
        name: str,
        *,
        reads_body: bool = False,
        shape: ErrorShape = openai_error,
    ) -> None:
        """`name`: of the route, for metrics."""
        self._doors, self._work, self._name = doors, work, name
        self._reads_body, self._shape = reads_body, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, reply = Headers(scope=scope), HttpReply(receive, send, new_fence())
        outcome = "ok"
        try:
            key = self._doors.keys.admit(headers)
            with self._doors.slots.taken(key) as slot:
                body = await read_body(headers, receive, self._doors.limits, slot) if self._reads_body else {}
                query = dict(QueryParams(scope["query_string"]))
                call = JsonCall(key=key, body=body, query=query, path=scope.get("path_params", {}))
                await reply.json(await self._answer(call, reply))
        except Exception as error:  # noqa: BLE001 - the client is told, and unexpected errors are logged
            told, outcome = as_told(error, reply.request_id)
            if not reply.started:
                await reply.error(told, self._shape)
        finally:
            REQUESTS.labels(self._name, outcome).inc()

    async def _answer(self, call: JsonCall, reply: HttpReply) -> Any:
        """Raises `Unavailable` if it takes too long, or if the client leaves meanwhile."""
        limits = self._doors.limits
        limit_s = min(limits.request_s, limits.call_s)
        work = asyncio.ensure_future(self._work(call))
        gone = asyncio.create_task(reply.departure(lambda: None, limits.keep_alive_s))
        try:
            await asyncio.wait({work, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        raise Unavailable(f"the client left, or the call took more than {limit_s:g} s; try again")
