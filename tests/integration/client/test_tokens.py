"""Signed tokens through the SDK: a trainer of one run publishes to a real relay, and nobody but its own reads it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.cli.credentials import signing_keys
from ebbtide.client import Client
from ebbtide.client.publisher.publisher import Authority
from ebbtide.client.relay_client import RelayClient as Sdk
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import PermissionDenied
from ebbtide.rpc.server import Server
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1.weights_pb2_grpc import add_WeightsServicer_to_server
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.servicer import SERVICE
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import as_array

TENSORS = {"w": np.arange(6, dtype="f4")}


class House:
    """A relay that verifies tokens, and who signs them."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self.address = folder, address

    def security(self, role: Role, run_id: str = "") -> ClientSecurity:
        return ClientSecurity(token=signing_keys.issue(self._folder, role, run_id=run_id, ttl_s=60, name=""))

    async def publish(self, security: ClientSecurity, run_id: str) -> PolicyVersion:
        async def reserve() -> tuple[int, bytes]:
            return 1, bytes(range(32))

        async def announce(_version: PolicyVersion) -> None: ...

        peer = ServicePeer("weight-relay", self.address, security, patience_s=5.0)
        try:
            publisher = Sdk(peer).publisher(run_id, "policy", authority=Authority(reserve, announce))
            return await (await publisher.publish(TENSORS, step=0))
        finally:
            await peer.close()

    async def fetch(self, security: ClientSecurity, run_id: str) -> Any:
        async with Client("127.0.0.1:1", self.address, security=security, patience_s=5.0) as client:
            _, tensors = await client.fetch_weights(run_id)
            return as_array(tensors["w"])


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    keys = signing_keys.make(tmp_path / "keys")
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path / "relay")))
    await relay.open()
    services = [(add_WeightsServicer_to_server, relay.servicer, SERVICE)]
    server = Server(ServerSettings(token_keys=str(keys)), services)
    await server.start()
    yield House(tmp_path / "keys", server.address)
    await server.stop(0.0)
    await relay.close()


async def test_a_trainer_publishes_and_its_runs_readers_read_with_tokens_of_the_run(house: House) -> None:
    await house.publish(house.security(Role.TRAINER, "run-a"), "run-a")
    for security in (house.security(Role.USER, "run-a"), house.security(Role.TRAINER, "run-a")):
        assert np.array_equal(await house.fetch(security, "run-a"), TENSORS["w"])
    assert np.array_equal(await house.fetch(house.security(Role.WORKER), "run-a"), TENSORS["w"])


async def test_tokens_of_another_run_or_role_neither_publish_nor_read(house: House) -> None:
    await house.publish(house.security(Role.TRAINER), "run-a")
    with pytest.raises(PermissionDenied, match="another run"):
        await house.fetch(house.security(Role.USER, "run-b"), "run-a")
    with pytest.raises(PermissionDenied, match="another run"):
        await house.publish(house.security(Role.TRAINER, "run-b"), "run-a")
    for role in (Role.USER, Role.WORKER, Role.OPERATOR):
        with pytest.raises(PermissionDenied, match="is for trainer"):
            await house.publish(house.security(role), "run-c")
