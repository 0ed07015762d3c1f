"""The HTTP server on real sockets: heads without end, TLS, and its end."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography import x509

from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.credentials import certificates
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.access import RequestLimits
from ebbtide.gateway.http.server import HttpServer
from ebbtide.gateway.settings import GatewaySettings, TlsSettings
from tests.support.waiting import wait_until

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def answer(_scope: Any, _receive: Any, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(app: Any = answer, **settings: Any) -> AsyncIterator[HttpServer]:
    made = GatewaySettings(security=ClientSecurity(token="t"), listen="127.0.0.1:0", **settings)
    server = HttpServer(app, made)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def connected(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_head_without_end_is_cut() -> None:
    async with serving(limits=RequestLimits(header_bytes=4096)) as server:
        reader, writer = await connected(server)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ")
        writer.write(b"a" * 4096)
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 431")
        writer.close()


async def test_a_head_that_never_comes_has_its_time() -> None:
    async with serving(limits=RequestLimits(header_s=0.05)) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\nhost:"):
            reader, writer = await connected(server)
            writer.write(sent)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()


async def test_large_bodies_and_kept_connections_pass() -> None:
    async with serving(limits=RequestLimits(header_bytes=4096)) as server, httpx.AsyncClient() as client:
        for _ in range(3):
            assert (await client.post(f"http://{server.address}/", content=b"x" * 300_000)).text == "ok"


async def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = GatewaySettings(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(InvalidRequest) as refused:
            await HttpServer(answer, settings).start()
    assert refused.value.field == "listen"


async def test_requests_under_way_are_finished_and_new_ones_are_not_taken() -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Send) -> None:
        began.set()
        await goes_on.wait()
        await answer(scope, receive, send)

    async with serving(slow) as server, httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        asked = asyncio.create_task(client.get("/"))
        await began.wait()
        stopping = asyncio.create_task(server.stop())
        host, _, port = server.address.rpartition(":")

        async def is_closed() -> bool:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:  # refused; or reset, where it was waiting as the socket closed
                return True
            writer.close()
            return False

        await wait_until(is_closed)
        goes_on.set()
        assert (await asked).text == "ok"
        await stopping


async def test_it_waits_for_requests_that_it_cancels() -> None:
    began, ended = asyncio.Event(), list[str]()

    async def stubborn(_scope: Any, _receive: Any, _send: Send) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.to_thread(lambda: None)
            ended.append("its rollouts are cancelled")

    async with serving(stubborn, drain_s=0.0) as server:
        _, writer = await connected(server)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        await server.stop()
        assert ended
        writer.close()


def issued(folder: Path) -> TlsSettings:
    certificates.init(folder, 2)
    certificates.issue(folder, "gateway", [Role.GATEWAY], ["127.0.0.1"], 1)
    return TlsSettings(tls_cert=str(folder / "gateway.pem"), tls_key=str(folder / "gateway.key"))


async def serial(server: HttpServer) -> int:
    """Of the certificate that new connections see."""
    port = int(server.address.rpartition(":")[2])
    found = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    return x509.load_pem_x509_certificate(found.encode()).serial_number


async def test_it_speaks_tls_with_the_present_certificate(tmp_path: Path) -> None:
    async with serving(door=issued(tmp_path)) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://{server.address}/")).text == "ok"
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                await client.get(f"http://{server.address}/")
        former = await serial(server)
        certificates.renew(tmp_path, "gateway", 1)
        assert await serial(server) != former


@pytest.mark.parametrize("half", ["gateway.pem", "gateway.key"])
async def test_while_half_of_a_pair_is_replaced_clients_see_the_former_one(tmp_path: Path, half: str) -> None:
    door = issued(tmp_path)
    async with serving(door=door) as server:
        former = await serial(server)
        beside = tmp_path / "beside"
        shutil.copytree(tmp_path, beside)
        certificates.renew(beside, "gateway", 1)
        halves = ["gateway.pem", "gateway.key"]
        (beside / half).rename(tmp_path / half)
        for _ in range(3):
            assert await serial(server) == former
        halves.remove(half)
        (beside / halves[0]).rename(tmp_path / halves[0])
        assert await serial(server) != former
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://{server.address}/")).text == "ok"


async def test_with_an_authority_clients_show_certificates(tmp_path: Path) -> None:
    door = msgspec.structs.replace(issued(tmp_path), client_ca=str(tmp_path / "ca.pem"))
    async with serving(door=door) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(verify=context) as client:
                await client.get(f"https://{server.address}/")
        context.load_cert_chain(door.tls_cert, door.tls_key)
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://{server.address}/")).text == "ok"
        other = tmp_path / "other"
        certificates.init(other, 2)
        (other / "ca.pem").rename(tmp_path / "ca.pem")
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(verify=context) as client:
                await client.get(f"https://{server.address}/")
