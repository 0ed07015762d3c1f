"""Runs a proxy between clients and an imitated serving engine, with a listener that records its calls."""

import asyncio
import contextlib
import functools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from prometheus_client import REGISTRY

from ebbtide.serving_guard.proxy.proxy import Proxy
from ebbtide.serving_guard.settings import ProxySettings
from tests.support.waiting import wait_until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Recorded:
    """A `Traffic` that keeps the calls in order: (call, request, ...)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.hold: Callable[[str], Awaitable[None] | None] = lambda request: None

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None:
        self.calls.append(("arrived", request, model, prompt_tokens, now, streamed))

    def ready(self, request: str) -> Awaitable[None] | None:
        return self.hold(request)

    def produced(self, request: str, tokens: int, now: float) -> None:
        self.calls.append(("produced", request, tokens, now))

    def ended(self, request: str, ok: bool, now: float) -> None:
        self.calls.append(("ended", request, ok, now))

    def of(self, call: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.calls if entry[0] == call]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.of("produced"))

    @property
    def outcomes(self) -> list[bool]:
        return [ok for _, ok, _ in self.of("ended")]

    def check_books(self) -> None:
        """Each `arrived` has exactly one `ended`, after it and after all of its `produced`."""
        assert Counter(entry[0] for entry in self.of("arrived")) == Counter(entry[0] for entry in self.of("ended"))
        over: set[str] = set()
        for call, request, *_ in self.calls:
            assert request not in over
            if call == "ended":
                over.add(request)


class Engine:
    """A serving engine: its routes can be replaced. `asked` counts requests, `broken_off` those that clients left."""

    def __init__(self) -> None:
        self.asked = self.broken_off = 0
        self.handler: Handler = self.answer
        self.events = 5
        self.step_s = 0.0
        self.go_on = asyncio.Event()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._counted)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _counted(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        try:
            return await self.handler(request)
        except (asyncio.CancelledError, ConnectionError):
            self.broken_off += 1
            raise

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST" and b'"stream":true' in body.replace(b" ", b""):
            return await self.stream(request)
        return web.json_response({"path": request.path_qs, "bytes": len(body), "usage": {"prompt_tokens": 7}})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Chat's events: the role, `events` tokens, [DONE]."""
        response = await begin(request)
        await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for number in range(self.events):
            await response.write(event({"choices": [{"delta": {"content": f"word {number}"}}]}))
            await asyncio.sleep(self.step_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def endless(self, request: web.Request) -> web.StreamResponse:
        """Tokens until the client leaves."""
        response = await begin(request)
        while True:
            await response.write(event({"choices": [{"delta": {"content": "more"}}]}))
            await asyncio.sleep(0.005)

    async def hanging(self, request: web.Request) -> web.StreamResponse:
        await self.go_on.wait()
        return await self.answer(request)


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def event(what: Any) -> bytes:
    return b"data: " + json.dumps(what).encode() + b"\n\n"


def counts() -> Counter[tuple[str, str]]:
    """The process's counters of the guard, by name and label."""
    found: Counter[tuple[str, str]] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if metric.type == "counter" and sample.name.startswith("ebbtide_guard_"):
                name = sample.name.removeprefix("ebbtide_guard_").removesuffix("_total")
                found[name, "".join(sample.labels.values())] += int(sample.value)
    return found


class Stand:
    def __init__(self, engine: Engine, proxy: Proxy, traffic: Recorded, session: aiohttp.ClientSession) -> None:
        self.engine, self.proxy, self.traffic, self.session = engine, proxy, traffic, session
        self._before = counts()

    def counted(self, name: str, label: str = "") -> int:
        """The increase of one of the guard's counters since the start."""
        return counts()[name, label] - self._before[name, label]

    async def chat(self, **more: Any) -> tuple[int, bytes]:
        """The status and the body of a streamed chat."""
        body = {"model": "served", "stream": True, "messages": [{"role": "user", "content": "hello there"}], **more}
        async with self.session.post(CHAT, json=body) as response:
            return response.status, await response.read()

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.proxy.address.split(":")
        return await asyncio.open_connection(host, int(port))

    async def say(self, data: bytes) -> bytes:
        """Send on a new connection, and return all that comes until the proxy closes it."""
        reader, writer = await self.raw()
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def told_all(self) -> None:
        """Wait until every request that arrived has ended."""
        await wait_until(lambda: len(self.traffic.of("arrived")) == len(self.traffic.of("ended")))


@contextlib.asynccontextmanager
async def standing(upstream: str = "", **limits: Any) -> AsyncIterator[Stand]:
    """Engine, proxy and a client session; at the end the books are checked. `upstream`: another engine's URL."""
    engine, traffic = Engine(), Recorded()
    await engine.start()
    settings = ProxySettings(**{"drain_s": 0.2, "connect_timeout_s": 2.0, **limits})
    proxy = Proxy(settings, upstream or engine.url, traffic, "127.0.0.1:0")
    await proxy.start()
    session = aiohttp.ClientSession(f"http://{proxy.address}", auto_decompress=False)
    try:
        yield Stand(engine, proxy, traffic, session)
    finally:
        await session.close()
        await proxy.stop()
        await engine.stop()
    traffic.check_books()


@contextlib.asynccontextmanager
async def scripted(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of an engine that runs `serve` on each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def many(stand: Stand, count: int) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    pairs = [await stand.raw() for _ in range(count)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.transport.abort()


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop that services run on."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def random_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)
