"""What `ebbtide health` says of a server is what the server says of itself."""

from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import Unauthenticated, Unavailable
from ebbtide.rpc.channel import check_serving
from tests.integration.rpc.conftest import TOKEN

SECURITY = ClientSecurity(token=TOKEN)


async def test_a_server_is_healthy_once_it_serves_and_not_before(cluster: Any) -> None:
    server = await cluster.serve()
    await server.set_serving(False)
    with pytest.raises(Unavailable, match="NOT_SERVING"):
        await check_serving(server.address, SECURITY, timeout_s=10)
    await server.set_serving(True)
    await check_serving(server.address, SECURITY, timeout_s=10)


async def test_who_has_no_token_is_told_nothing_of_its_health(cluster: Any) -> None:
    server = await cluster.serve()
    with pytest.raises(Unauthenticated):
        await check_serving(server.address, ClientSecurity(token="wrong"), timeout_s=10)


async def test_a_server_that_is_gone_is_not_healthy(cluster: Any) -> None:
    server = await cluster.serve()
    await server.stop(0)
    with pytest.raises(Unavailable, match=server.address):
        await check_serving(server.address, SECURITY, timeout_s=10)
