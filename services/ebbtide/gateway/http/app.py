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
from ebbtide.gateway.http.route import AppState, JsonRoute
from ebbtide.gateway.http.run_routes import RunRoutes
from ebbtide.gateway.http.session_routes import SessionRoutes
from ebbtide.gateway.http.text_route import TextRoute


def make_app(state: AppState) -> Starlette:
    """The gateway's application. The same routes stand behind /sessions/{id}, for clients that set a URL alone."""
    text = _text_routes(state)
    routes = [
        Route("/health", _health(state), methods=["GET"]),
        *_run_routes(state),
        *_session_routes(state),
        *text,
        Mount("/sessions/{session_id}", routes=[*text, *_model_routes(state), _count_route(state)]),
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
    runs = RunRoutes(state)
    return [
        Route("/v1/models", JsonRoute(state, runs.models, "/v1/models"), methods=["GET"]),
        Route("/v1/models/{model}", JsonRoute(state, runs.model, "/v1/models"), methods=["GET"]),
    ]


def _count_route(state: AppState) -> BaseRoute:
    counts = JsonRoute(state, RunRoutes(state).count_tokens, "/v1/messages", reads_body=True, shape=anthropic_error)
    return Route("/v1/messages/count_tokens", counts, methods=["POST"])


def _session_routes(state: AppState) -> Sequence[BaseRoute]:
    sessions, one = SessionRoutes(state), "/v1/sessions/{session_id}"
    return [
        Route("/v1/sessions", JsonRoute(state, sessions.listed, "/v1/sessions"), methods=["GET"]),
        Route("/v1/sessions", JsonRoute(state, sessions.open, "/v1/sessions", reads_body=True), methods=["POST"]),
        Route(one, JsonRoute(state, sessions.trace, "/v1/sessions"), methods=["GET"]),
        Route(f"{one}/completions", JsonRoute(state, sessions.completions, "/v1/sessions"), methods=["GET"]),
        *(
            Route(f"{one}/{name}", JsonRoute(state, work, "/v1/sessions", reads_body=True), methods=["POST"])
            for name, work in {"reward": sessions.reward, "end": sessions.end}.items()
        ),
    ]


def _run_routes(state: AppState) -> Sequence[BaseRoute]:
    runs = RunRoutes(state)
    asked = {"/server_info": runs.server_info, "/get_world_size": runs.world_size}
    return [
        *_model_routes(state),
        Route("/v1/usage", JsonRoute(state, runs.usage, "/v1/usage"), methods=["GET"]),
        Route("/tokenize", JsonRoute(state, runs.tokenize, "/tokenize", reads_body=True), methods=["POST"]),
        _count_route(state),
        *(Route(path, JsonRoute(state, work, path), methods=["GET"]) for path, work in asked.items()),
    ]


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
    told = NotFound(f"{request.method} {request.url.path[:200]} is not served here; docs/gateway.md lists the routes")
    return JSONResponse(openai_error(status, told, ""), status_code=status)
