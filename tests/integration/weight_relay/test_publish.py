"""A version is published whole, or nothing of it is ever seen."""

import asyncio
import signal
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.relay_client import RelayClient
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import AlreadyExists, ChunkCorrupt, InvalidRequest, NotReady, Unauthenticated, VersionUnavailable
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import weights_pb2
from ebbtide.weights import as_array, build_manifest, named_tensor
from tests.integration.weight_relay.lines import SIGNER
from tests.integration.weight_relay.signed_relay import SignedRelay
from tests.support.waiting import wait_until


async def test_what_is_published_is_fetched_bit_for_bit(relay: SignedRelay, sample: Any) -> None:
    version = await relay.publish("run", sample.version, sample.weights)
    manifest, tensors = await relay.fetch("run", "policy", 0)
    assert manifest.version == version == sample.manifest.version
    assert {name: as_array(tensor).tobytes() for name, tensor in tensors.items()} == {
        name: value.tobytes() for name, value in sample.weights.items()
    }


async def test_publishing_again_is_harmless_and_another_body_is_refused(relay: SignedRelay, sample: Any) -> None:
    first = await relay.publish("run", sample.version, sample.weights)
    assert await relay.publish("run", sample.version, sample.weights) == first
    changed = {**sample.weights, "layer.0": sample.weights["layer.1"]}
    with pytest.raises(AlreadyExists, match="another root"):
        await relay.publish("run", sample.version, changed)


async def test_tiles_that_the_relay_holds_are_not_asked_for_again(wire: Any, relay: SignedRelay, sample: Any) -> None:
    await relay.publish("run", sample.version, sample.weights)
    changed = sample.weights["layer.2"].copy()
    changed[0] ^= 1
    version = PolicyVersion(policy="policy", version=2, parent=1)
    tensors = [named_tensor(*item) for item in {**sample.weights, "layer.2": changed}.items()]
    assert len(await wire.begin(SIGNER.sign(build_manifest("run", version, tensors)))) == 1


async def test_nothing_is_visible_before_the_commit(wire: Any, relay: SignedRelay, sample: Any) -> None:
    assert set(await wire.begin(sample.manifest)) == set(sample.tiles)
    with pytest.raises(NotReady, match="still lacks 12 tiles"):
        await wire.commit(sample.manifest)
    assert await wire.put(sample.tiles) == 12
    with pytest.raises(VersionUnavailable, match="not here"):
        await relay.fetch("run", "policy", 0)
    with pytest.raises(VersionUnavailable, match="no version held here"):
        await wire.fetch([next(iter(sample.tiles))])
    assert (await wire.commit(sample.manifest)).size == 12 << 20
    assert (await wire.commit(sample.manifest)).size == 12 << 20
    await relay.fetch("run", "policy", 1)


async def test_corrupt_truncated_and_unknown_tiles_are_refused_and_never_stored(
    wire: Any, process: Any, sample: Any
) -> None:
    digest, data = next(iter(sample.tiles.items()))
    with pytest.raises(InvalidRequest, match="no staged version"):
        await wire.put({digest: data})
    await wire.begin(sample.manifest)
    for bad in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:], b""):
        with pytest.raises(ChunkCorrupt):
            await wire.put({digest: bad})
    with pytest.raises(InvalidRequest, match="no staged version"):
        await wire.put({bytes(32): data})
    with pytest.raises(InvalidRequest, match="32 bytes"):
        await wire.put({b"../../x": data})
    assert process.tiles() == set()


async def test_a_manifest_that_lies_is_refused_by_the_field(wire: Any, sample: Any) -> None:
    head, lying, *rest = sample.manifest.tensors
    for name, error in (("../layer", InvalidRequest), ("layer.9", ChunkCorrupt)):
        tensors = (head, msgspec.structs.replace(lying, name=name), *rest)
        with pytest.raises(error, match=r"tensors\.name|root digest"):
            await wire.begin(msgspec.structs.replace(sample.manifest, tensors=tensors))


@pytest.mark.parametrize("sent", [0, 1, 7, 12])
async def test_a_relay_killed_mid_publish_shows_nothing_and_cleans_up(
    sent: int, process: Any, wire: Any, relay: SignedRelay, sample: Any
) -> None:
    await wire.begin(sample.manifest)
    call = wire.stub.PutTiles()
    for digest, data in list(sample.tiles.items())[:sent]:
        await call.write(weights_pb2.Tile(digest=digest, data=data))
    await wait_until(lambda: len(process.tiles()) == sent, what="the tiles on disk")
    (process.data / "staging" / "half-a-tile").write_bytes(b"x" * 1000)
    process.end(signal.SIGKILL)
    call.cancel()
    await process.start()
    assert process.tiles() == set()
    assert not list((process.data / "staging").iterdir())
    with pytest.raises(VersionUnavailable):
        await relay.fetch("run", "policy", 0)
    await relay.publish("run", sample.version, sample.weights)
    assert len(process.tiles()) == 12


async def test_a_publish_survives_the_relays_death(process: Any, relay: SignedRelay, sample: Any) -> None:
    publish = asyncio.create_task(relay.publish("run", sample.version, sample.weights))
    await wait_until(lambda: len(process.tiles()) >= 1 or publish.done(), interval=0.001, what="the first tile")
    process.end(signal.SIGKILL)
    await process.start()
    assert await publish == sample.manifest.version
    await relay.fetch("run", "policy", 1)


async def test_committed_versions_are_found_again_after_a_restart(
    process: Any, relay: SignedRelay, sample: Any
) -> None:
    await relay.publish("run", sample.version, sample.weights)
    for how, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        assert process.end(how) == code
        await process.start()
        assert (await relay.fetch("run", "policy", 0))[0].version == sample.manifest.version


async def test_a_publishers_mistakes_are_told_by_the_tensors_name(relay: SignedRelay) -> None:
    version = PolicyVersion(policy="policy", version=1)
    with pytest.raises(InvalidRequest, match="complex64"):
        await relay.publish("run", version, {"w": np.zeros(3, "c8")})
    with pytest.raises(InvalidRequest, match="stands in the manifest twice"):
        await relay.publish("run", version, [("w", np.zeros(3)), ("w", np.ones(3))])


async def test_a_wrong_token_gets_nothing(process: Any, peer: ServicePeer) -> None:
    other = ServicePeer("weight-relay", process.address, ClientSecurity(token="wrong"), patience_s=10.0)
    with pytest.raises(Unauthenticated):
        await RelayClient(other).fetch("run", "policy", 0)
    await other.close()
