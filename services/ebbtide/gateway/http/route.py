"""What all routes share: the parts of the gateway that they need, reading a request, and answering it or its error."""

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from ebbtide.client.lease import GatewayLease
from ebbtide.errors import (
    AlreadyExists,
    BudgetSpent,
    EbbtideError,
    Internal,
    InvalidRequest,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.gateway.access import ClientKey, KeyRing, RequestLimits, RequestSlot, RequestSlots, SessionLimits
from ebbtide.gateway.dialects.dialect import Answer, BodyTooLarge, ErrorShape, openai_error, retry_after_s, status_of
from ebbtide.gateway.metrics import ERRORS, REQUESTS
from ebbtide.gateway.request import TextRequest
from ebbtide.gateway.request_player import RequestPlayer
from ebbtide.gateway.runs import RunDirectory
from ebbtide.gateway.sessions.turn_player import SessionCache, SessionPlayer
from ebbtide.telemetry import get_logger
from ebbtide.types.ids import check_client_id, check_session_name, new_fence

REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"
GROUP_ID = "x-group-id"


def with_ids(
    request: TextRequest, headers: Headers, path: Mapping[str, str], request_id_header: str = REQUEST_ID
) -> TextRequest:
    """The request with the ids of its headers and its path, which count before those of its body."""
    request_id = headers.get(request_id_header, "") or request.request_id
    session_id = path.get("session_id", "") or headers.get(SESSION_ID, "") or request.session_id
    return msgspec.structs.replace(
        request,
        request_id=check_client_id(request_id, field="X-Request-ID"),
        session_id=check_session_name(session_id, field="X-Session-ID"),
        group_id=check_client_id(_group(headers, session_id), field="X-Group-ID"),
    )


def _group(headers: Headers, session_id: str) -> str:
    group_id = headers.get(GROUP_ID, "")
    if group_id and not session_id:
        raise InvalidRequest("is of a session; name the session by X-Session-ID, too", field="X-Group-ID")
    return group_id


class AppState(Struct, frozen=True, kw_only=True):
    """The parts of the gateway that a route needs."""

    keys: KeyRing
    limits: RequestLimits
    slots: RequestSlots
    directory: RunDirectory
    session_limits: SessionLimits
    cache: SessionCache
    request_id_header: str = REQUEST_ID  # by which clients come back
    is_leaving: Callable[[], bool]  # whether the gateway takes no more requests

    def sessions_of(self, lease: GatewayLease, player: RequestPlayer, key: ClientKey) -> SessionPlayer:
        """The sessions of a key on one run."""
        return SessionPlayer(self.cache, lease, player, self.session_limits, key.sessions_of)

    def check_open(self) -> None:
        """Raise `Unavailable` once the gateway shuts down."""
        if self.is_leaving():
            raise Unavailable("this gateway is shutting down; try again, another one answers")


_encoder: Final = msgspec.json.Encoder()
_JSON: Final = (b"content-type", b"application/json")
#: No proxy on the way holds events back, or changes them.
_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class HttpReply:
    """The answer on one connection. `started`: its status is sent, so errors must follow in the body."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive, self._send = receive, send
        self.request_id = request_id
        self.started = False
        self._streams = False
        self._sent_at = time.monotonic()

    async def json(self, content: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        data = _encoder.encode(content)
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, (_JSON, length, *headers))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def error(self, error: EbbtideError, shape: ErrorShape) -> None:
        status = status_of(error)
        await self.json(shape(status, error, self.request_id), status, _error_headers(error, status))

    async def begin_events(self) -> None:
        await self._start(200, _EVENTS)
        self._streams, self._sent_at = True, time.monotonic()

    async def events(self, data: bytes) -> None:
        """Send whole events. Waits while the client reads slowly."""
        if data:
            self._sent_at = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        self._streams = False
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def departure(self, answer_of: Callable[[], Answer | None], keep_alive_s: float) -> None:
        """Return when the client has left. Until then keep the stream alive while its answer has nothing new.

        The answer comes to be while this runs.
        """
        while True:
            quiet_s = time.monotonic() - self._sent_at if self._streams else 0.0
            try:
                async with asyncio.timeout(max(0.0, keep_alive_s - quiet_s)):
                    while (await self._receive())["type"] != "http.disconnect":
                        pass
                    return
            except TimeoutError:
                answer, quiet_s = answer_of(), time.monotonic() - self._sent_at
                if answer is not None and self._streams and quiet_s >= keep_alive_s:
                    await self.events(answer.idle())

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.started = True
        named = (b"x-request-id", self.request_id.encode("latin-1", "replace"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, named]})


def _error_headers(error: EbbtideError, status: int) -> tuple[tuple[bytes, bytes], ...]:
    headers: list[tuple[bytes, bytes]] = []
    if (wait := retry_after_s(error)) is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(wait))).encode()))
    if isinstance(error, AlreadyExists | VersionUnavailable):  # OpenAI's clients retry every other 409
        headers.append((b"x-should-retry", b"true" if isinstance(error, VersionUnavailable) else b"false"))
    if isinstance(error, BudgetSpent):
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    return tuple(headers)


_decoder: Final = msgspec.json.Decoder()
_CONTAINERS: Final = frozenset({dict, list})
#: Bytes of a body that is decoded in a thread.
_LARGE: Final = 64 << 10
#: Also one that does not end, so that no byte is looked at twice.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_body(headers: Headers, receive: Receive, limits: RequestLimits, slot: RequestSlot) -> dict[str, Any]:
    """The body's object.

    Raises `BodyTooLarge`, `InvalidRequest` naming `body`, `NoCapacity` while other bodies fill the memory for them, and
    `Unavailable` if the client leaves.
    """
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("is compressed; send it as it is", field="body")
    try:
        async with asyncio.timeout(limits.body_s):
            data = await _read(receive, limits, slot)
    except TimeoutError:
        raise InvalidRequest(f"did not arrive within {limits.body_s:g} s", field="body") from None
    # A long list of numbers takes a while to walk.
    return await asyncio.to_thread(_decoded, data, limits) if len(data) > _LARGE else _decoded(data, limits)


async def _read(receive: Receive, limits: RequestLimits, slot: RequestSlot) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Unavailable("the client left before its request had arrived")
        part = message.get("body", b"")
        size += len(part)
        if size > limits.body_bytes:
            raise _too_large(limits)
        slot.add_body(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _decoded(data: bytes, limits: RequestLimits) -> dict[str, Any]:
    if _has_more(data, limits.json_containers):
        raise InvalidRequest(f"has more than {limits.json_containers} objects and lists", field="body")
    try:
        body = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field="body") from None
    except RecursionError:
        raise _too_deep(limits) from None
    if not isinstance(body, dict):
        raise InvalidRequest("must be a JSON object", field="body")
    _check_depth(body, limits)
    return body


def _has_more(data: bytes, most: int) -> bool:
    """Whether a body has more than `most` objects and lists: as text three bytes each, decoded some eighty."""
    if data.count(b"[") + data.count(b"{") <= most:
        return False
    bare = _STRING.sub(b"", data)
    return bare.count(b"[") + bare.count(b"{") > most


def _check_depth(body: dict[str, Any], limits: RequestLimits) -> None:
    """Whatever reads the body later recurses into it at most so deeply."""
    level: list[Any] = [body]
    for _ in range(limits.json_depth):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return
    raise _too_deep(limits)


def _too_large(limits: RequestLimits) -> BodyTooLarge:
    return BodyTooLarge(f"has more than {limits.body_bytes} bytes, the most that this gateway takes", field="body")


def _too_deep(limits: RequestLimits) -> InvalidRequest:
    return InvalidRequest(f"nests deeper than {limits.json_depth} objects and lists", field="body")


log = get_logger(__name__)


def as_told(error: Exception, request_id: str) -> tuple[EbbtideError, str]:
    """The error as the client may see it, and its outcome for metrics. It is counted. Unexpected ones are logged under
    an id. The error forgets where it was raised: the frames there refer to it, and no collection would free the cycle.
    """
    told = _tellable(error, request_id)
    _forget_frames(error)
    status = status_of(told)
    ERRORS.labels(str(status)).inc()
    return told, "refused" if status < 500 else "failed"


def _tellable(error: Exception, request_id: str) -> EbbtideError:
    if isinstance(error, EbbtideError) and not isinstance(error, Internal):
        return error
    name = secrets.token_hex(4)
    log.error("unexpected error", exc_info=error, error_id=name, request_id=request_id)
    return Internal(f"internal error {name}; look for this id in the gateway's log")


def _forget_frames(error: BaseException) -> None:
    chain: list[BaseException | None] = [error]
    while chain:
        if (one := chain.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            chain += one.__cause__, one.__context__


class JsonCall(Struct, frozen=True, kw_only=True):
    """One call of such a route. `body` is empty unless the route reads one."""

    key: ClientKey
    body: Mapping[str, Any]
    query: Mapping[str, str]
    path: Mapping[str, str]


JsonWork = Callable[[JsonCall], Awaitable[Any]]


class JsonRoute:
    """An ASGI application."""

    def __init__(
        self,
        state: AppState,
        work: JsonWork,
        name: str,
        *,
        reads_body: bool = False,
        shape: ErrorShape = openai_error,
    ) -> None:
        """`name`: of the route, for metrics."""
        self._state, self._work, self._name = state, work, name
        self._reads_body, self._shape = reads_body, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, reply = Headers(scope=scope), HttpReply(receive, send, new_fence())
        outcome = "ok"
        try:
            key = self._state.keys.admit(headers)
            with self._state.slots.taken(key) as slot:
                body = await read_body(headers, receive, self._state.limits, slot) if self._reads_body else {}
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
        limits = self._state.limits
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
