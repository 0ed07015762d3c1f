"""Asks a server whether it serves, as supervisors do."""

from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import Unavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated


async def check_serving(address: str, security: ClientSecurity, *, timeout_s: float) -> None:
    """Return if the server at `address` says SERVING within `timeout_s`. Otherwise raise `Unavailable`, or
    `Unauthenticated` for an unknown token.
    """
    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with translated("server", address):
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unavailable(f"the server at {address} answers but does not serve: {name}")
