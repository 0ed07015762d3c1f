"""What a servicer raises is what a client raises, for every kind of call; and nothing unexpected leaks."""

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import grpc
import pytest

from ebbtide import errors
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import EbbtideError, Internal, InvalidRequest, NoCapacity, Unavailable
from ebbtide.rpc.channel import open_channel, write, write_first
from ebbtide.rpc.status_table import translated
from tests.support.waiting import wait_until

METHODS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def failing(error: Exception) -> Any:
    async def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("method", METHODS)
async def test_the_client_raises_what_the_servicer_raised(cluster: Any, method: str) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(errors.LeaseSuperseded("another trainer holds the lease; step down"))
    with pytest.raises(errors.LeaseSuperseded, match="another trainer holds the lease; step down"), translated("x"):
        await cluster.call(channel, method, tiles=0)
    await wait_until(lambda: [code for _, code in cluster.seen] == ["ABORTED"])


async def test_field_and_retry_after_cross_the_wire(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(InvalidRequest("must be über 1 €", field="spec.größe [0]\n"))
    with pytest.raises(InvalidRequest) as refused, translated("coordinator"):
        await cluster.call(channel, "unary_unary")
    assert refused.value.field == "spec.größe [0]\n"
    assert str(refused.value) == "spec.größe [0]\n: must be über 1 €"
    cluster.probe.act = failing(NoCapacity("queue full", retry_after_s=0.25))
    with pytest.raises(NoCapacity) as full, translated("coordinator"):
        await cluster.call(channel, "unary_stream")
    assert full.value.retry_after_s == 0.25


@pytest.mark.parametrize("method", METHODS)
async def test_the_text_of_an_unexpected_error_stays_in_the_log(
    cluster: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(RuntimeError("password is hunter2"))
    with caplog.at_level(logging.ERROR), pytest.raises(Internal) as seen, translated("coordinator"):
        await cluster.call(channel, method, tiles=0)
    assert "hunter2" not in str(seen.value)
    record = next(record for record in caplog.records if hasattr(record, "error_id"))
    assert record.error_id in str(seen.value)
    assert record.exc_info is not None
    assert "hunter2" in str(record.exc_info[1])


async def test_a_long_text_is_cut_and_still_arrives(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(InvalidRequest("ü" * 100_000, field="f" * 100_000))
    with pytest.raises(InvalidRequest) as seen, translated("coordinator"):
        await cluster.call(channel, "unary_unary")
    assert len(str(seen.value)) < 2000


async def test_a_cancelled_call_ends_its_servicer_and_no_error_is_logged(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    channel = await cluster.connect((await cluster.serve()).address)

    async def forever() -> None:
        await asyncio.Event().wait()

    cluster.probe.act = forever
    for method in ("unary_unary", "unary_stream", "stream_stream"):
        task = asyncio.create_task(cluster.call(channel, method))
        await wait_until(partial(cluster.probe.calls.count, method))
        task.cancel()
        await wait_until(partial(cluster.probe.ended.count, method))
        with pytest.raises(asyncio.CancelledError):
            await task
    await wait_until(lambda: len(cluster.seen) == 3)
    assert {code for _, code in cluster.seen} == {"CANCELLED"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_servicer_that_hangs_is_ended_by_the_server_whatever_the_client_allows(cluster: Any) -> None:
    server = await cluster.serve(ServerSettings(token="correct horse", max_unary_s=0.1))
    channel = await cluster.connect(server.address)
    cluster.probe.act = asyncio.Event().wait
    with pytest.raises(Unavailable, match=r"not done within 0\.1 s"), translated("coordinator"):
        await cluster.call(channel, "unary_unary", timeout=60)
    assert cluster.probe.ended == ["unary_unary"]


async def test_a_deadline_that_passes_names_the_service(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = asyncio.Event().wait
    named = pytest.raises(Unavailable, match="relay at somewhere did not answer in time")
    with named, translated("relay", "somewhere"):
        await cluster.call(channel, "unary_unary", timeout=0.1)


async def test_a_timeout_inside_a_servicer_is_no_deadline(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(TimeoutError("inner"))
    with pytest.raises(Internal), translated("coordinator"):
        await cluster.call(channel, "unary_unary")


async def test_a_service_that_is_down_is_named_with_its_address(cluster: Any) -> None:
    server = await cluster.serve()
    await server.stop(0)
    channel = await cluster.connect(server.address)
    named = pytest.raises(Unavailable, match=f"coordinator at {server.address} cannot be reached")
    with named, translated("coordinator", server.address):
        await cluster.call(channel, "unary_unary")


async def test_a_method_that_the_peer_lacks_is_named_as_a_difference_of_versions(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    with pytest.raises(EbbtideError, match="does not offer this call"), translated("coordinator"):
        await channel.unary_unary("/ebbtide.v1.Runs/Nothing")(b"")


async def test_writing_to_a_stream_that_ended_raises_its_status(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = failing(errors.LeaseSuperseded("step down"))
    stream: Any = channel.stream_stream("/ebbtide.v1.Fleet/Append")()
    await write(stream, b"")
    await wait_until(stream.done)
    with pytest.raises(errors.LeaseSuperseded, match="step down"), translated("coordinator"):
        await write(stream, b"")


async def test_a_status_that_a_write_under_way_covered_is_still_worth_a_retry() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )
    with pytest.raises(Unavailable, match="coordinator ended the call"), translated("coordinator"):
        raise lost


async def test_a_first_message_ends_with_its_call_even_before_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = open_channel(f"127.0.0.1:{silent.getsockname()[1]}", ClientSecurity(token="token"))
        call = channel.stream_stream("/a/b")()
        writing = asyncio.create_task(write_first(call, b""))
        for _ in range(20):
            await asyncio.sleep(0)  # gRPC's own write has begun, and waits for a connection
        call.cancel()
        done, _ = await asyncio.wait((writing,), timeout=10)
        assert done, "gRPC's own write waits for ever"
        assert writing.cancelled()
        await channel.close()
