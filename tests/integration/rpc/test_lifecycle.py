"""Health, reflection, and the order of a graceful stop."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ebbtide.auth.security import ServerSettings
from ebbtide.errors import Draining, Unavailable
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import runs_pb2
from tests.support.waiting import wait_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "ebbtide.v1.Runs", "ebbtide.v1.Fleet", "ebbtide.v1.Weights")


@pytest.mark.parametrize("name", NAMES)
async def test_health_starts_not_serving_and_flips(cluster: Any, name: str) -> None:
    server = await cluster.serve()
    health: Any = health_pb2_grpc.HealthStub(await cluster.connect(server.address))
    request = health_pb2.HealthCheckRequest(service=name)
    assert (await health.Check(request)).status == NOT_SERVING
    await server.set_serving(True)
    assert (await health.Check(request)).status == SERVING
    await server.set_serving(False)
    assert (await health.Check(request)).status == NOT_SERVING


async def test_reflection_lists_the_services(cluster: Any) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    mirror: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answers = [answer async for answer in mirror.ServerReflectionInfo(requests)]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert listed >= {*NAMES[1:], "grpc.health.v1.Health"}


async def test_a_stop_turns_health_first_then_ends_streams_and_waits_for_calls(cluster: Any) -> None:
    server = await cluster.serve()
    await server.set_serving(True)
    channel = await cluster.connect(server.address)
    health: Any = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    release = asyncio.Event()
    cluster.probe.act = release.wait
    unary = asyncio.create_task(cluster.call(channel, "unary_unary"))
    stream = asyncio.create_task(cluster.call(channel, "unary_stream"))
    await wait_until(lambda: len(cluster.probe.calls) == 2)

    stop = asyncio.create_task(server.stop(grace=10))
    assert (await watch.read()).status == NOT_SERVING
    with pytest.raises(Draining), translated("coordinator"):
        await stream
    assert not unary.done()
    assert not stop.done()
    release.set()
    assert (await unary).run_id == "a"
    watch.cancel()
    await asyncio.wait_for(stop, 5)


async def test_a_stop_ends_calls_that_outlast_the_grace(cluster: Any) -> None:
    server = await cluster.serve()
    channel = await cluster.connect(server.address)
    cluster.probe.act = asyncio.Event().wait
    unary = asyncio.create_task(cluster.call(channel, "unary_unary"))
    await wait_until(lambda: cluster.probe.calls)
    await asyncio.wait_for(server.stop(grace=0.1), 5)
    with pytest.raises(Unavailable), translated("coordinator"):
        await unary


async def test_a_stream_that_is_busy_sending_ends_as_draining_too(cluster: Any) -> None:
    server = await cluster.serve()
    channel = await cluster.connect(server.address)
    received = asyncio.Event()

    async def drain() -> None:
        request = runs_pb2.WatchRunRequest(cursor="endless").SerializeToString()
        with translated("coordinator"):
            async for _ in channel.unary_stream("/ebbtide.v1.Runs/WatchRun")(request):
                received.set()

    task = asyncio.create_task(drain())
    await received.wait()
    await asyncio.wait_for(server.stop(grace=10), 5)
    with pytest.raises(Draining):
        await task
    assert cluster.probe.ended == ["unary_stream"]


async def test_a_channel_finds_a_server_that_restarts_on_its_port(cluster: Any) -> None:
    server = await cluster.serve()
    channel = await cluster.connect(server.address)
    assert await cluster.call(channel, "unary_unary")
    await server.stop(0)
    with pytest.raises(Unavailable), translated("coordinator"):
        await cluster.call(channel, "unary_unary")
    await cluster.serve(ServerSettings(token="correct horse", listen=server.address))

    async def answered() -> bool:
        try:
            with translated("coordinator"):
                return bool(await cluster.call(channel, "unary_unary"))
        except Unavailable:
            return False

    await wait_until(answered, timeout=5)


async def test_a_unix_socket_serves_as_well(cluster: Any, tmp_path: Path) -> None:
    server = await cluster.serve(ServerSettings(token="correct horse", listen=f"unix:{tmp_path}/s"))
    channel = await cluster.connect(server.address)
    assert (await cluster.call(channel, "unary_unary")).run_id == "a"
