"""Runs a service's gRPC server, with authentication, limits, health and reflection.

`Gate` wraps every servicer: it admits calls, maps errors to statuses, limits unary calls in time, and records each
call. Handlers are wrapped once per method. A call then costs its admission; a message of a stream costs one generator
step.

Invariant: a server accepts calls from `start` to `stop`. Its health says SERVING only between `set_serving(True)` and
`stop`, for the whole server ("") and for each of its services alike. A restart loses nothing.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ebbtide.auth.admission import Admission, Anyone, admission_of, caller_name
from ebbtide.auth.security import ServerSettings
from ebbtide.errors import Draining, EbbtideError, InvalidRequest, Unavailable
from ebbtide.rpc.channel import KEEPALIVE_S, check_address, server_options
from ebbtide.rpc.fair_limiter import WITHOUT_TURN, FairLimiter
from ebbtide.rpc.status_table import to_status

#: Gets each ended call: full method name, status name, seconds. Must not raise.
Observer = Callable[[str, str, float], None]
if TYPE_CHECKING:  # generic only in the stubs
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Handler, Context = grpc.RpcMethodHandler, grpc.aio.ServicerContext
#: (request streams, response streams) -> the handler's attribute, and the function that makes such a handler.
_KINDS: Final[dict[tuple[bool, bool], tuple[str, Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
#: gRPC's own services. A closed server still answers its health.
_OWN: Final = "/grpc."


class Gate(grpc.aio.ServerInterceptor):
    """Refuses forbidden calls, turns exceptions into statuses, and ends streams when the server leaves."""

    def __init__(
        self,
        admission: Admission | Anyone,
        *,
        max_unary_s: float,
        calls_per_user: int = 0,
        observe: Observer | None = None,
    ) -> None:
        self._admission, self._max_unary_s, self._observe = admission, max_unary_s, observe
        self._turns = FairLimiter(calls_per_user)
        self._wrapped: dict[str, Handler] = {}  # by method; only methods that exist
        self._waiting: set[asyncio.Task[Any]] = set()  # response streams that wait for their servicer, not for gRPC
        self._leaving = False
        self.closed: EbbtideError | None = None  # see `Server.closed`

    def end_streams(self) -> None:
        """End response streams as `Draining`: most would never end by themselves.

        A stream that sends a message ends after it: if cancelled earlier, gRPC would give the client no reason.
        """
        self._leaving = True
        for task in self._waiting:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        handler = self._wrapped.get(method)
        if handler is None:
            inner = await continuation(handler_call_details)
            if inner is None:
                return None  # gRPC answers UNIMPLEMENTED
            handler = self._wrapped[method] = self._wrap(method, inner)
        try:
            self._admission.admit(method, handler_call_details.invocation_metadata)
        except EbbtideError as error:
            if self._observe:
                self._observe(method, to_status(error).code.name, 0.0)
            return _answering(handler, error)
        return handler if self.closed is None or method.startswith(_OWN) else _answering(handler, self.closed)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kind = handler.request_streaming, handler.response_streaming
        name, make = _KINDS[kind]
        behaviour = getattr(handler, name)
        if inspect.isasyncgenfunction(behaviour):
            wrapped: Any = self._generator(method, behaviour)
        else:
            wrapped = _apart(self._coroutine(method, behaviour, None if any(kind) else self._max_unary_s))
        made: Handler = make(wrapped, handler.request_deserializer, handler.response_serializer)
        return made

    def _coroutine(self, method: str, behaviour: Callable[..., Awaitable[Any]], limit: float | None) -> Any:
        takes_turn = limit is not None and method not in WITHOUT_TURN  # without a limit it has a stream, which may last

        async def call(request: Any, context: Context) -> Any:
            with self._recorded(method, context):
                try:
                    async with asyncio.timeout(limit) as clock:
                        checked = self._admission.checked(method, request, context)
                        if not takes_turn:
                            return await behaviour(checked, context)
                        async with self._turns.of(caller_name()):
                            return await behaviour(checked, context)
                except (asyncio.CancelledError, grpc.aio.AbortError):
                    raise
                except Exception as error:  # noqa: BLE001 - nothing above handles it; `to_status` logs it
                    late = isinstance(error, TimeoutError) and clock.expired()
                    await _abort(context, Unavailable(f"not done within {limit} s; retry") if late else error)

        return call

    def _generator(self, method: str, behaviour: Callable[..., AsyncGenerator[Any, None]]) -> Any:
        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                task = cast("asyncio.Task[Any]", asyncio.current_task())
                self._waiting.add(task)
                with self._recorded(method, context):
                    try:
                        requests = self._admission.checked(method, request, context)
                        self._turns.begin_stream(caller_name())
                        async with aclosing(behaviour(requests, context)) as responses:
                            async for response in responses:
                                self._waiting.discard(task)
                                yield response
                                if self._leaving:
                                    break
                                self._waiting.add(task)
                    except asyncio.CancelledError:
                        if not self._leaving:
                            raise
                    except grpc.aio.AbortError:
                        raise
                    except Exception as error:  # noqa: BLE001 - nothing above handles it; `to_status` logs it
                        await _abort(context, error)
                    finally:
                        self._waiting.discard(task)
                    if self._leaving:
                        await _abort(context, Draining("the service leaves; connect again"))
            except grpc.aio.AbortError as error:  # as in `_apart`, which would cost each message a step
                raise _bare(error) from None
            finally:
                del request, context

        return stream

    @contextmanager
    def _recorded(self, method: str, context: Context) -> Iterator[None]:
        start, code = time.monotonic(), "OK"
        try:
            yield
        except grpc.aio.AbortError:
            code = _name(context.code())
            raise
        except BaseException:
            code = StatusCode.CANCELLED.name
            raise
        finally:
            if self._observe:
                self._observe(method, code, time.monotonic() - start)


async def _abort(context: Context, error: Exception) -> None:
    status = to_status(error)
    await context.abort(status.code, status.details, status.metadata)


def _apart(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    """A coroutine that does the same, and keeps the call apart from its error. gRPC keeps the error with the call, so
    an error that refers to frames with the call is part of a cycle, and so is the request.
    """

    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError as error:
            raise _bare(error) from None
        finally:
            del request, context

    return call


def _bare(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    error.__context__ = None
    return error.with_traceback(None)


def _answering(handler: Handler, error: EbbtideError) -> Handler:
    """A handler of the same kind that raises `error` and parses no request."""

    async def answer(request: Any, context: Context) -> None:  # noqa: ARG001 - a call of any kind
        await _abort(context, error)

    make = _KINDS[handler.request_streaming, handler.response_streaming][1]
    made: Handler = make(_apart(answer))
    return made


def _name(code: object) -> str:
    """The name of a code that gRPC's context may give as an integer."""
    return next((known.name for known in StatusCode if code in (known, known.value[0])), StatusCode.UNKNOWN.name)


#: The generated function that registers a servicer, the servicer, and the service's full name.
Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]
_STATUS: Final = health_pb2.HealthCheckResponse


class Server:
    """`services` as in [(add_X_to_server, servicer, "pkg.X")]. `window_bytes`: see `server_options`; `calls_per_user`:
    see `FairLimiter`.

    `private`: the address is a unix socket in a folder that only this user can enter, so callers need no token. Raises
    `InvalidRequest` for unsafe settings: no way to authenticate callers, or no TLS off the loopback.
    """

    def __init__(
        self,
        settings: ServerSettings,
        services: Sequence[Service],
        *,
        observe: Observer | None = None,
        keepalive_s: float = KEEPALIVE_S,
        window_bytes: int = 0,
        calls_per_user: int = 0,
        private: bool = False,
    ) -> None:
        self._listen = check_address(settings.listen, field="listen")
        if private and not self._listen.startswith("unix:"):
            raise InvalidRequest("only a unix socket needs no token", field="listen")
        self._credentials = settings.credentials()
        admission = Anyone() if private else admission_of(settings)
        self._gate = gate = Gate(
            admission, max_unary_s=settings.max_unary_s, calls_per_user=calls_per_user, observe=observe
        )
        options = server_options(keepalive_s, max_streams=settings.max_streams, window_bytes=window_bytes)
        self._server = grpc.aio.server(interceptors=[gate], options=options)
        self._names = [name for _, _, name in services]
        for add, servicer, _ in services:
            add(servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = 0

    @property
    def address(self) -> str:
        """The address for clients; known after `start`."""
        return self._listen if self._listen.startswith("unix:") else f"{self._listen.rpartition(':')[0]}:{self.port}"

    @property
    def closed(self) -> EbbtideError | None:
        """The error that answers every call, except health checks; None: calls are served."""
        return self._gate.closed

    @closed.setter
    def closed(self, why: EbbtideError | None) -> None:
        self._gate.closed = why

    async def start(self) -> None:
        """Bind, and accept calls as NOT_SERVING. Raises `InvalidRequest` naming `listen` if the address is taken."""
        await self.set_serving(False)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._listen)
            else:
                self.port = self._server.add_secure_port(self._listen, self._credentials)
        except RuntimeError:
            raise InvalidRequest(f"cannot bind {self._listen}: is it in use?", field="listen") from None
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace: float = 5.0) -> None:
        """Report NOT_SERVING from now on, end streams as `Draining`, and cancel other calls after `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        self._gate.end_streams()
        await self._server.stop(grace)
