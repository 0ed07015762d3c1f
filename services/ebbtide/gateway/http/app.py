"""Puts the routes together as one ASGI application."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.errors import NotFound
from ebbtide.gateway.dialects.anthropic import MessagesDialect
from ebbtide.gateway.dialects.chat import ChatDialect
from ebbtide.gateway.dialects.completions import CompletionDialect
from ebbtide.gateway.dialects.dialect import Dialect, ErrorShape, anthropic_error, openai_error
from ebbtide.gateway.dialects.responses import ResponsesDialect
from ebbtide.gateway.dialects.sglang import SglangDialect
from ebbtide.gateway.dialects.token_generate import TokenGenerateDialect
from ebbtide.gateway.http.route import AppState, JsonRoute, JsonWork
from ebbtide.gateway.http.run_routes import RunRoutes
from ebbtide.gateway.http.session_routes import SessionRoutes
from ebbtide.gateway.http.text_route import TextRoute


def make_app(state: AppState) -> Starlette:
    """The gateway's application. The same routes stand behind /sessions/{id}, for clients that set a URL alone."""
    text, models = _text_routes(state), _model_routes(state)
    routes = [
        Route("/health", _health(state), methods=["GET"]),
        *models,
        *_call_routes(state),
        *text,
        Mount("/sessions/{session_id}", routes=[*text, *models]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
    app.add_middleware(_WithoutEscapedSlashes)
    app.router.redirect_slashes = False  # a redirection would lead where the client's Host header says
    return app


def _text_routes(state: AppState) -> Sequence[BaseRoute]:
    limits = state.limits
    chat = ChatDialect(max_messages=limits.messages, max_tools=limits.tools)
    responses = ResponsesDialect(max_items=limits.messages, max_tools=limits.tools)
    messages = MessagesDialect(max_messages=limits.messages, max_tools=limits.tools)
    served: dict[str, tuple[Dialect, ErrorShape]] = {
        "/v1/completions": (CompletionDialect(), openai_error),
        "/v1/chat/completions": (chat, openai_error),
        "/v1/responses": (responses, openai_error),
        "/v1/messages": (messages, anthropic_error),
        "/inference/v1/generate": (TokenGenerateDialect(), openai_error),
        "/generate": (SglangDialect(), openai_error),
    }
    return [
        Route(path, TextRoute(state, dialect, shape, path), methods=["POST"])
        for path, (dialect, shape) in served.items()
    ]


def _model_routes(state: AppState) -> Sequence[BaseRoute]:
    """What clients ask that set a URL alone: which models there are, and how long a text is."""
    runs = RunRoutes(state)
    return [
        _get(state, "/v1/models", runs.models),
        _get(state, "/v1/models/{model}", runs.model, "/v1/models"),
        _post(state, "/v1/messages/count_tokens", runs.count_tokens, "/v1/messages", anthropic_error),
    ]


def _call_routes(state: AppState) -> Sequence[BaseRoute]:
    runs, sessions, name = RunRoutes(state), SessionRoutes(state), "/v1/sessions"
    one = f"{name}/{{session_id}}"
    return [
        _get(state, "/v1/usage", runs.usage),
        _post(state, "/tokenize", runs.tokenize),
        _get(state, "/server_info", runs.server_info),
        _get(state, "/get_world_size", runs.world_size),
        _get(state, name, sessions.listed),
        _post(state, name, sessions.open),
        _get(state, one, sessions.trace, name),
        _get(state, f"{one}/completions", sessions.completions, name),
        _post(state, f"{one}/reward", sessions.reward, name),
        _post(state, f"{one}/end", sessions.end, name),
    ]


def _get(state: AppState, path: str, work: JsonWork, name: str = "") -> BaseRoute:
    """`name`: of the route, for metrics, if it is not its path."""
    return Route(path, JsonRoute(state, work, name or path), methods=["GET"])


def _post(state: AppState, path: str, work: JsonWork, name: str = "", shape: ErrorShape = openai_error) -> BaseRoute:
    return Route(path, JsonRoute(state, work, name or path, reads_body=True, shape=shape), methods=["POST"])


def _health(state: AppState):  # type: ignore[no-untyped-def]
    async def health(_request: Request) -> Response:
        """200 while the gateway takes requests. Nobody needs a key to ask."""
        if state.is_leaving() or not state.directory.is_ready:
            return PlainTextResponse("not ready\n", status_code=503)
        return PlainTextResponse("")

    return health


class _WithoutEscapedSlashes:
    """Answers 404 to paths with an escaped slash, which arrive here as if it parted them: a session `a%2Freward` as the
    reward of session `a`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and b"%2f" in scope.get("raw_path", b"").lower():
            told = NotFound("no id has a slash, so no path has an escaped one")
            await JSONResponse(openai_error(404, told, ""), status_code=404)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _unknown_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    called = f"{request.method} {request.url.path[:200]}"
    told = NotFound(f"{called} is not served here; docs/guides/agents-and-gateway.md lists the routes")
    return JSONResponse(openai_error(status, told, ""), status_code=status)
