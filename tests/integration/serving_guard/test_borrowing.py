"""Guard and worker exchange messages on their stream."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ebbtide.errors import EbbtideError, InvalidRequest, NotReady, Superseded
from ebbtide.grants import Page, page_path, socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.rpc.status_table import translated
from ebbtide.types.grants import GRANT_S, GRANTS_VERSION
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from tests.integration.serving_guard.guards import GuardProcess, guard_process
from tests.support.waiting import wait_until

REPORT = pb.BorrowerMessage(report=pb.Report(running=1, residency=pb.RESIDENCY_AWAKE, wanted=True))


@pytest.fixture
async def guard(grant_dir: Path) -> AsyncIterator[GuardProcess]:
    with guard_process(grant_dir, "http://127.0.0.1:9") as made:
        await made.ready()
        yield made


@pytest.fixture
async def stub(guard: GuardProcess, grant_dir: Path) -> AsyncIterator[GrantsStub]:
    async with open_socket(socket_path(grant_dir)) as channel:
        yield GrantsStub(channel)


@pytest.fixture
def page(grant_dir: Path) -> Page:
    made = Page(page_path(grant_dir, "w"), create=True)
    made.enter(os.getpid(), kv_total=8, block_bytes=1 << 10)
    return made


def hello(**fields: Any) -> pb.BorrowerMessage:
    given: dict[str, Any] = {
        "protocol_version": GRANTS_VERSION,
        "worker_id": "w",
        "slots": 4,
        "step_tokens": 32,
        "kv_bytes": 1 << 13,
    }
    return pb.BorrowerMessage(hello=pb.Hello(**(given | fields)))


async def stream(stub: GrantsStub, *messages: pb.BorrowerMessage) -> Any:
    """A stream on which these messages were sent."""
    call: Any = stub.Borrow()
    for message in messages:
        await call.write(message)
    return call


async def refused(call: Any) -> EbbtideError:
    with pytest.raises(EbbtideError) as error, translated("serving-guard"):
        await asyncio.wait_for(_read_out(call), 10)
    return error.value


async def _read_out(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_grants_are_renewed_before_they_run_out(stub: GrantsStub, page: Page) -> None:
    call = await stream(stub, hello(), REPORT)
    first, second = [await call.read() for _ in range(2)]
    assert (first.tokens, first.sequences, first.kv_bytes) == (32, 4, 1 << 13)
    assert first.expires_s == GRANT_S
    assert second.sequence == first.sequence + 1
    await wait_until(lambda: page.offered().tokens)
    assert page.idle(), "nothing is inside"
    call.cancel()
    await wait_until(lambda: not page.offered().tokens)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"protocol_version": 99}, NotReady, "version"),
        ({"worker_id": "../w"}, InvalidRequest, "worker_id"),
        ({"worker_id": "other"}, InvalidRequest, "other.page"),
        ({"pids": [1]}, InvalidRequest, "pids"),
        ({"pids": [4_000_000]}, InvalidRequest, "pids"),
    ],
)
async def test_a_hello_that_cannot_be_is_refused_by_name(
    stub: GrantsStub, page: Page, fields: dict[str, Any], kind: type[EbbtideError], text: str
) -> None:
    error = await refused(await stream(stub, hello(**fields)))
    assert isinstance(error, kind)
    assert text in str(error)


async def test_a_worker_says_who_it_is_first_and_once(stub: GrantsStub, page: Page) -> None:
    assert "hello" in str(await refused(await stream(stub, REPORT)))
    assert "hello" in str(await refused(await stream(stub, hello(), hello())))


async def test_a_second_stream_of_a_worker_takes_the_place_of_the_first(
    guard: GuardProcess, stub: GrantsStub, page: Page
) -> None:
    old = await stream(stub, hello(), REPORT)
    assert (await old.read()).tokens
    new = await stream(stub, hello(), REPORT)
    assert isinstance(await refused(old), Superseded)
    assert (await new.read()).tokens
    await wait_until(lambda: page.offered().tokens)
    assert len((await guard.status()).borrowers) == 1
    new.cancel()


async def test_a_worker_that_falls_silent_is_granted_nothing(stub: GrantsStub, page: Page) -> None:
    call = await stream(stub, hello(), REPORT)
    assert (await call.read()).tokens
    async with asyncio.timeout(5):
        while (await call.read()).tokens:
            pass
    await wait_until(lambda: not page.offered().tokens)
    await call.write(REPORT)
    async with asyncio.timeout(5):
        while not (await call.read()).tokens:
            pass
    call.cancel()


async def test_the_status_is_sent_at_the_interval_or_once(stub: GrantsStub) -> None:
    once = [one async for one in stub.WatchGuard(pb.WatchGuardRequest())]
    assert len(once) == 1
    watch: Any = stub.WatchGuard(pb.WatchGuardRequest(interval_s=0.05))
    first, second = [await watch.read() for _ in range(2)]
    assert second.uptime_s > first.uptime_s > 0
    watch.cancel()
    with pytest.raises(InvalidRequest, match="interval_s"), translated("serving-guard"):
        async for _ in stub.WatchGuard(pb.WatchGuardRequest(interval_s=-1)):
            pass
