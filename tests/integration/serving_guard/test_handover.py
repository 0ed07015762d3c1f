"""User traffic goes on when the guard is killed: its socket outlives it, or a balancer reaches the engine itself."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.proxy.proxy import bound_socket, handed_over, socket_address
from tests.integration.serving_guard.stand import Engine, on_uvloop
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class Guard:
    """A proxy's process. `held`: the listening socket that it takes over, if any."""

    def __init__(self, upstream: str, held: socket.socket | None = None, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "tests.integration.serving_guard.guarding", upstream, listen]
        passed = [held.fileno()] if held else []
        self._process = subprocess.Popen(
            command + [str(number) for number in passed], cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=passed
        )

    async def address(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()


@contextlib.contextmanager
def guarding(upstream: str, held: socket.socket | None = None, listen: str = "127.0.0.1:0") -> Iterator[Guard]:
    guard = Guard(upstream, held, listen)
    try:
        yield guard
    finally:
        guard.kill()


async def get(port: int, request: bytes = GET) -> bytes:
    """The whole answer; fails if the connection is refused or reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@on_uvloop
async def test_a_killed_guards_successor_answers_those_who_came_meanwhile() -> None:
    engine = Engine()
    await engine.start()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as held:
        port = held.getsockname()[1]
        with guarding(engine.url, held) as first:
            assert await first.address() == f"127.0.0.1:{port}"
            engine.handler = engine.endless
            amid = [asyncio.create_task(get(port, GET)) for _ in range(10)]
            await wait_until(lambda: engine.asked == 10)
            first.kill()
            await asyncio.gather(*amid, return_exceptions=True)  # these are cut short, and see it
        engine.handler = engine.answer
        asked = engine.asked
        came = [asyncio.create_task(get(port)) for _ in range(100)]
        await asyncio.wait(came, timeout=0.2)
        assert not any(task.done() for task in came)  # waiting, not refused
        with guarding(engine.url, held) as second:
            assert await second.address() == f"127.0.0.1:{port}"
            answers = await asyncio.gather(*came)
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert engine.asked == asked + 100
    await engine.stop()


class Balancer:
    """The rule of `deploy/haproxy/haproxy.cfg` over TCP: to the guard while its last health check passed, else to the
    engine; a connection that the guard refuses goes to the engine too.
    """

    def __init__(self, guard: int, engine: int) -> None:
        self._guard, self._engine = guard, engine
        self.healthy = False
        self.chosen: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._tasks.add(asyncio.create_task(self._check()))
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _check(self) -> None:
        request = b"GET /ebbtide/health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        while True:
            try:
                self.healthy = (await get(self._guard, request)).startswith(b"HTTP/1.1 200 ")
            except OSError:
                self.healthy = False
            await asyncio.sleep(0.05)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        for port in (self._guard, self._engine) if self.healthy else (self._engine,):
            with contextlib.suppress(ConnectionError):
                upstream = await asyncio.open_connection("127.0.0.1", port)
                self.chosen.append(port)
                await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer), return_exceptions=True)
                return


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@on_uvloop
async def test_behind_a_balancer_the_engine_answers_while_the_guard_is_dead() -> None:
    engine = Engine()
    await engine.start()
    balancer = None
    try:
        with guarding(engine.url) as guard:
            address = await guard.address()
            guard_port = int(address.rpartition(":")[2])
            balancer = Balancer(guard_port, engine.port)
            port = await balancer.start()
            await wait_until(lambda: balancer.healthy)
            assert (await get(port)).startswith(b"HTTP/1.1 200 ")
            assert balancer.chosen == [guard_port]
            guard.kill()
            for _ in range(50):  # not one is refused, from the first moment on
                assert (await get(port)).startswith(b"HTTP/1.1 200 ")
            assert set(balancer.chosen[1:]) == {engine.port}
            await wait_until(lambda: not balancer.healthy)
        with guarding(engine.url, listen=address) as guard:
            await guard.address()
            await wait_until(lambda: balancer.healthy)
            assert (await get(port)).startswith(b"HTTP/1.1 200 ")
            assert balancer.chosen[-1] == guard_port
    finally:
        if balancer is not None:
            await balancer.stop()
        await engine.stop()


def test_sockets_handed_to_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert handed_over() == []
    with bound_socket("127.0.0.1:0") as made:
        assert socket_address(made).startswith("127.0.0.1:")


@pytest.mark.parametrize("listen", ["", "8100", "127.0.0.1:", "127.0.0.1:99999", "256.1.1.1:0", "no such host:1"])
def test_an_address_that_cannot_be_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="listen"):
        bound_socket(listen)


def test_a_taken_port_is_refused_by_its_name() -> None:
    with bound_socket("127.0.0.1:0") as made, pytest.raises(InvalidRequest, match="listen: cannot bind"):
        bound_socket(socket_address(made))
