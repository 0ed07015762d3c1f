"""Every call needs the token: all kinds, health and reflection too."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import Unauthenticated
from ebbtide.rpc.status_table import translated

METHODS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
WRONG = ["correct hors", "correct horse ", "Correct horse", "x" * 4000]


@pytest.mark.parametrize("method", METHODS)
async def test_the_right_token_lets_every_kind_of_call_through(cluster: Any, method: str) -> None:
    channel = await cluster.connect((await cluster.serve()).address)
    assert await cluster.call(channel, method)
    assert cluster.probe.calls == [method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token", WRONG[:1])
async def test_a_wrong_token_stops_every_kind_of_call(cluster: Any, method: str, token: str) -> None:
    channel = await cluster.connect((await cluster.serve()).address, ClientSecurity(token=token))
    with pytest.raises(Unauthenticated, match="EBBTIDE_TOKEN"), translated("coordinator"):
        await cluster.call(channel, method, tiles=0)
    assert cluster.probe.calls == []
    assert [code for _, code in cluster.seen] == ["UNAUTHENTICATED"]


@pytest.mark.parametrize("token", WRONG)
async def test_only_the_whole_token_counts(cluster: Any, token: str) -> None:
    address = (await cluster.serve()).address
    async with grpc.aio.insecure_channel(address) as bare:
        with pytest.raises(Unauthenticated), translated("coordinator"):
            await cluster.call(bare, "unary_unary", metadata=(("authorization", f"Bearer {token}"),), timeout=10)
    assert cluster.probe.calls == []


@pytest.mark.parametrize("metadata", [(), (("authorization", ""),), (("authorization", "correct horse"),)])
async def test_no_token_or_one_without_its_scheme_is_refused(cluster: Any, metadata: Any) -> None:
    async with grpc.aio.insecure_channel((await cluster.serve()).address) as bare:
        with pytest.raises(Unauthenticated), translated("coordinator"):
            await cluster.call(bare, "unary_unary", metadata=metadata, timeout=10)


async def test_health_and_reflection_need_the_token_too(cluster: Any) -> None:
    async with grpc.aio.insecure_channel((await cluster.serve()).address) as bare:
        health: Any = health_pb2_grpc.HealthStub(bare)
        mirror: Any = reflection_pb2_grpc.ServerReflectionStub(bare)  # type: ignore[arg-type] # of sync stubs
        with pytest.raises(Unauthenticated), translated("coordinator"):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        with pytest.raises(Unauthenticated), translated("coordinator"):
            async for _ in health.Watch(health_pb2.HealthCheckRequest(), timeout=10):
                pass
        with pytest.raises(Unauthenticated), translated("coordinator"):
            await mirror.ServerReflectionInfo(timeout=10).read()


async def test_the_request_of_an_unknown_caller_is_not_parsed(cluster: Any) -> None:
    async with grpc.aio.insecure_channel((await cluster.serve()).address) as bare:
        garbage: Any = bare.unary_unary("/ebbtide.v1.Runs/GetRun")
        with pytest.raises(Unauthenticated), translated("coordinator"):
            await garbage(b"\xff\xff\xff", timeout=10)


async def test_the_token_may_lie_in_a_file_on_both_sides(cluster: Any, tmp_path: Any) -> None:
    path = tmp_path / "token"
    path.write_text("from a file\n")
    server = await cluster.serve(ServerSettings(token_file=str(path)))
    channel = await cluster.connect(server.address, ClientSecurity(token_file=str(path)))
    assert (await cluster.call(channel, "unary_unary")).run_id == "a"
