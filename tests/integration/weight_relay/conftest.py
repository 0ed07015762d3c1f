"""A relay as its own process, so that it can be killed, and clients of it."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.service_peer import ServicePeer
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import build_manifest, named_tensor, slice_tiles, tile_digest
from tests.fakes.service_process import TOKEN, ServiceProcess
from tests.integration.weight_relay.lines import SIGNER
from tests.integration.weight_relay.signed_relay import SignedRelay
from tests.integration.weight_relay.wire import Wire


class RelayProcess(ServiceProcess):
    """A weight-relay on a directory of its own; started again, it has the same directory and port."""

    def __init__(self, directory: Path, data: Path | None = None) -> None:
        """`data`: another directory of a relay."""
        self.data = data or directory / "data"
        super().__init__("weight_relay", directory, "--data-dir", str(self.data))

    def tiles(self) -> set[str]:
        return {path.name for path in (self.data / "tiles").iterdir()}

    def manifests(self) -> list[Path]:
        return sorted((self.data / "versions").rglob("*.manifest"))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RelayProcess]:
    relay = RelayProcess(tmp_path)
    yield relay
    relay.end(signal.SIGKILL)


@pytest.fixture
async def peer(process: RelayProcess) -> AsyncIterator[ServicePeer]:
    """A connection to the relay, which this starts."""
    await process.start()
    peer = ServicePeer("weight-relay", process.address, ClientSecurity(token=TOKEN), patience_s=10.0)
    yield peer
    await peer.close()


@pytest.fixture
def relay(peer: ServicePeer) -> SignedRelay:
    return SignedRelay(peer)


@pytest.fixture
def wire(peer: ServicePeer) -> Wire:
    return Wire(peer)


class Sample:
    """A version of 12 tiles, and what a publisher sends for it."""

    def __init__(self, version: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = {f"layer.{i}": rng.integers(0, 256, 3 << 20, dtype="u1") for i in range(4)}
        self.version = PolicyVersion(policy="policy", version=version)
        tensors = [named_tensor(*item) for item in self.weights.items()]
        self.manifest: Manifest = SIGNER.sign(build_manifest("run", self.version, tensors))
        self.tiles = {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor)}


@pytest.fixture
def sample() -> Sample:
    return Sample()
