"""Reading versions with the SDK: slices alone where slices are wanted, by patches and from whoever has them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import InvalidRequest, PermissionDenied, VersionUnavailable
from ebbtide.rpc.server import Server
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1.weights_pb2_grpc import add_WeightsServicer_to_server
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.servicer import SERVICE, RelayServicer
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import as_array
from tests.integration.weight_relay.signed_relay import SignedRelay as Weights

SECURITY = ClientSecurity(token="a-token-of-tests")


class Counting(RelayServicer):
    """Counts the blobs that it sends."""

    sent = 0

    async def FetchTiles(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for tile in super().FetchTiles(request, context):
            self.sent += 1
            yield tile


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Counting, str]]:
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path / "relay")))
    await relay.open()
    counting = Counting(relay.intake, relay.reader, relay.fanout, relay.ends, relay.library.limits)
    server = Server(ServerSettings(token=SECURITY.token), [(add_WeightsServicer_to_server, counting, SERVICE)])
    await server.start()
    yield counting, server.address
    await server.stop(0.0)
    await relay.close()


@pytest.fixture
async def weights(served: tuple[Counting, str]) -> AsyncIterator[Weights]:
    peer = ServicePeer("weight-relay", served[1], SECURITY, patience_s=10.0)
    yield Weights(peer)
    await peer.close()


def tensors(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    large, small = rng.standard_normal((1024, 2048)).astype("f4"), rng.standard_normal(100).astype("f4")
    return {"large": large + (rng.random(large.shape) < 0.01 * step).astype("f4"), "small": small + step}


async def test_versions_that_came_by_patches_are_read_whole(weights: Weights) -> None:
    for number in (1, 2, 3):
        version = PolicyVersion(policy="policy", version=number, parent=number - 1)
        await weights.publish("run", version, tensors(number))
    for number in (2, 3, 1):
        manifest, found = await weights.fetch("run", "policy", number)
        assert manifest.version.version == number
        assert list(found) == ["large", "small"]
        assert all(np.array_equal(as_array(found[name]), value) for name, value in tensors(number).items())
    assert (await weights.fetch("run", "policy", 0))[0].version.version == 3
    with pytest.raises(VersionUnavailable):
        await weights.fetch("run", "policy", 4)


async def test_slices_cost_the_tiles_that_hold_them(weights: Weights, served: tuple[Counting, str]) -> None:
    await weights.publish("run", PolicyVersion(policy="policy", version=1), tensors(1))
    boxes = {"large": ((100, 120), (7, 2000)), "small": ((99, 100),)}
    _, found = await weights.fetch("run", "policy", 1, boxes)
    assert served[0].sent == 2
    assert (found["large"].start, found["large"].full) == ((100, 7), (1024, 2048))
    assert np.array_equal(as_array(found["large"]), tensors(1)["large"][100:120, 7:2000])
    assert np.array_equal(as_array(found["small"]), tensors(1)["small"][99:])
    with pytest.raises(InvalidRequest, match="small"):
        await weights.fetch("run", "policy", 1, {"small": ((0, 101),)})


async def test_another_publishers_version_is_refused(weights: Weights) -> None:
    await weights.publish("run", PolicyVersion(policy="policy", version=1), tensors(1))
    manifest, _ = await weights.fetch("run", "policy", 1)
    if manifest.publisher:
        await weights.fetch("run", "policy", 1, publisher=manifest.publisher)
    with pytest.raises(PermissionDenied):
        await weights.fetch("run", "policy", 1, publisher=b"x" * 32)
