"""Channel options are believed only where their effect is seen."""

import asyncio
from typing import Any

import grpc
import pytest

from ebbtide.auth.security import ServerSettings
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.rpc.channel import DEFAULT_TIMEOUT_S, MAX_MESSAGE_BYTES, STREAMS
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import runs_pb2
from tests.support.waiting import wait_until

GET_RUN = "/ebbtide.v1.Runs/GetRun"


def get_run(size: int) -> bytes:
    """A serialised GetRunRequest of exactly `size` bytes."""
    overhead = len(runs_pb2.GetRunRequest(run_id="x" * size).SerializeToString()) - size
    made = runs_pb2.GetRunRequest(run_id="x" * (size - overhead)).SerializeToString()
    assert len(made) == size
    return made


@pytest.mark.parametrize("window_bytes", [0, 1 << 20], ids=["probed", "fixed window"])
async def test_a_message_may_have_4_mib_and_no_byte_more(cluster: Any, window_bytes: int) -> None:
    server = await cluster.serve(window_bytes=window_bytes)
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=unlimited) as channel:
        send: Any = channel.unary_unary(GET_RUN)
        metadata = (("authorization", "Bearer correct horse"),)
        await send(get_run(MAX_MESSAGE_BYTES), metadata=metadata, timeout=30)
        with pytest.raises(InvalidRequest, match=r"too large .* send less at a time"), translated("coordinator"):
            await send(get_run(MAX_MESSAGE_BYTES + 1), metadata=metadata, timeout=30)
    assert cluster.probe.calls == ["unary_unary"]


async def test_a_client_refuses_to_send_a_larger_message(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    with pytest.raises(InvalidRequest, match="too large"), translated("coordinator"):
        await channel.unary_unary(GET_RUN)(get_run(MAX_MESSAGE_BYTES + 1))
    assert cluster.probe.calls == []


async def test_however_many_streams_are_open_unary_calls_get_through(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    release, free = asyncio.Event(), cluster.probe.act
    cluster.probe.act = release.wait
    streams = [asyncio.create_task(cluster.call(channel, "unary_stream")) for _ in range(1100)]
    await wait_until(lambda: len(cluster.probe.calls) == len(streams), what="all streams are served")
    cluster.probe.act = free
    assert await cluster.call(channel, "unary_unary", timeout=10)
    assert channel.connections == -(-len(streams) // STREAMS)
    release.set()
    assert {len(events) for events in await asyncio.gather(*streams)} == {2}
    await wait_until(lambda: channel.connections == 1, what="connections without streams are closed")
    assert await cluster.call(channel, "unary_unary", timeout=10)


async def test_pings_at_the_agreed_rate_keep_an_idle_stream(cluster: Any) -> None:
    server = await cluster.serve(keepalive_s=0.1)
    channel = await cluster.connect(server.address, keepalive_s=0.1)
    release = asyncio.Event()
    cluster.probe.act = release.wait
    task = asyncio.create_task(cluster.call(channel, "unary_stream"))
    await wait_until(lambda: cluster.probe.calls)
    with pytest.raises(TimeoutError):  # twenty pings
        await asyncio.wait_for(asyncio.shield(task), 2.0)
    release.set()
    assert len(await task) == 2


async def test_pings_faster_than_agreed_are_refused_so_the_pair_of_options_matters(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address, keepalive_s=0.1)
    cluster.probe.act = asyncio.Event().wait
    with pytest.raises(Unavailable, match=r"(?i)too many pings|too_many_pings"), translated("coordinator"):
        await asyncio.wait_for(cluster.call(channel, "unary_stream"), 20)


async def test_a_unary_call_has_a_deadline_though_its_caller_names_none(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    cluster.probe.act = asyncio.Event().wait
    call: Any = channel.unary_unary(GET_RUN)(b"")
    remaining = call.time_remaining()
    assert 0 < remaining <= DEFAULT_TIMEOUT_S
    call.cancel()
    stream: Any = channel.unary_stream("/ebbtide.v1.Runs/WatchRun")(b"")
    assert stream.time_remaining() is None
    stream.cancel()


async def test_calls_beyond_the_streams_of_a_connection_wait_for_a_free_one(cluster: Any) -> None:
    server = await cluster.serve(ServerSettings(token="correct horse", max_streams=2))
    channel = await cluster.connect(server.address)
    release = asyncio.Event()
    cluster.probe.act = release.wait
    tasks = [asyncio.create_task(cluster.call(channel, "unary_unary")) for _ in range(3)]
    await wait_until(lambda: len(cluster.probe.calls) == 2)
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(cluster.probe.calls) > 2, timeout=0.3)
    release.set()
    assert len(await asyncio.gather(*tasks)) == 3


async def test_a_port_in_use_is_refused_by_name(cluster: Any) -> None:
    server = await cluster.serve()
    with pytest.raises(InvalidRequest, match=f"listen: cannot bind {server.address}"):
        await cluster.serve(ServerSettings(token="t", listen=server.address))
