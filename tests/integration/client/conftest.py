"""A coordinator that does as it is told, on a real socket: it can refuse, restart, and hand a lease to another."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.client import Client
from ebbtide.client.service_peer import ServicePeer
from ebbtide.rpc.server import Server
from ebbtide.v1.weights_pb2_grpc import add_WeightsServicer_to_server
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.servicer import SERVICE
from ebbtide.weight_relay.settings import RelaySettings
from tests.fakes.scripted_coordinator import TOKEN, Script, ScriptedCoordinator
from tests.integration.client.reader import Reader


@pytest.fixture
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    served = ScriptedCoordinator()
    await served.start()
    yield served
    await served.stop()


@pytest.fixture
def script(coordinator: ScriptedCoordinator) -> Script:
    return coordinator.script


@pytest.fixture
async def client(coordinator: ScriptedCoordinator) -> AsyncIterator[Client]:
    async with Client(coordinator.address, security=ClientSecurity(token=TOKEN), patience_s=10.0) as client:
        yield client


class RelayServer:
    """A relay in this process; started again, it listens where it did, with what its directory then holds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = "127.0.0.1:0"
        self.service: WeightRelay | None = None
        self._server: Server | None = None

    async def start(self) -> None:
        self.service = WeightRelay(RelaySettings(data_dir=str(self.directory)))
        await self.service.open()
        settings = ServerSettings(listen=self.address, token=TOKEN)
        self._server = Server(settings, [(add_WeightsServicer_to_server, self.service.servicer, SERVICE)])
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        if self._server is not None and self.service is not None:
            await self._server.stop(0.0)
            await self.service.close()
            self._server = self.service = None

    async def forget(self) -> None:
        """Start again with nothing."""
        await self.stop()
        shutil.rmtree(self.directory)
        await self.start()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RelayServer]:
    server = RelayServer(tmp_path / "relay")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def relay(server: RelayServer) -> str:
    """The address of a relay in this process."""
    return server.address


@pytest.fixture
async def both(coordinator: ScriptedCoordinator, relay: str) -> AsyncIterator[Client]:
    """A client of a coordinator and a relay."""
    coordinator.script.ttl_s = 60.0
    async with Client(coordinator.address, relay, security=ClientSecurity(token=TOKEN), patience_s=10.0) as client:
        yield client


@pytest.fixture
async def reader(relay: str) -> AsyncIterator[Reader]:
    peer = ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=5.0)
    reader = Reader(peer, "run")
    yield reader
    reader.close()
    await peer.close()
