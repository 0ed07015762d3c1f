"""A trainer publishes through the lease, and anybody fetches: the SDK against a real relay."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, SyncClient
from ebbtide.errors import InvalidRequest, LeaseSuperseded
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weights import NamedTensor, as_array, named_tensor
from tests.support.waiting import wait_until

SECURITY = ClientSecurity(token="a-token-of-tests")


def weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a.weight": rng.standard_normal((300, 1000)).astype("f4"), "b": np.float32(seed)}


async def test_a_version_is_announced_once_the_relay_holds_it(both: Client, script: Any) -> None:
    async with both.claim("run") as lease:
        first = await lease.publish(weights(1), step=0)
        second = await lease.publish(weights(2).items(), step=1, parent=first.version)
    assert (first.version, second.version, second.parent, second.step) == (1, 2, 1, 1)
    announced = [request.version for request in script.calls("AnnounceVersion")]
    assert [(item.version, item.root) for item in announced] == [(1, first.root), (2, second.root)]
    manifest, tensors = await both.fetch_weights("run")
    assert manifest.version == second
    assert all(np.array_equal(as_array(tensors[name]), value) for name, value in weights(2).items())
    manifest, _ = await both.fetch_weights("run", version=1)
    assert manifest.version == first


async def test_one_shot_iterators_and_named_tensors_are_published(both: Client) -> None:
    bits = np.arange(6, dtype="u2").reshape(2, 3)

    def tensors() -> Iterator[NamedTensor | tuple[str, Any]]:
        yield named_tensor("brain", bits, dtype="BF16")
        yield "plain", bits

    async with both.claim("run") as lease:
        await lease.publish(tensors(), step=0)
    _, found = await both.fetch_weights("run")
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in found.values()] == [
        ("brain", "BF16", (2, 3)),
        ("plain", "U16", (2, 3)),
    ]


async def test_only_what_the_relay_lacks_is_sent(both: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []
    put = VersionIntake.put

    async def spy(self: VersionIntake, digest: bytes, data: bytes) -> None:
        received.append(digest)
        await put(self, digest, data)

    monkeypatch.setattr(VersionIntake, "put", spy)
    async with both.claim("run") as lease:
        await lease.publish(weights(1), step=0)
        assert len(received) == 3
        await lease.publish({**weights(1), "b": np.float32(9)}, step=1)
        assert len(received) == 4
        await lease.publish(weights(1), step=2)
        assert len(received) == 4


async def test_a_refused_publish_announces_nothing(both: Client, script: Any) -> None:
    async with both.claim("run") as lease:
        with pytest.raises(InvalidRequest, match=r"tensors\.name"):
            await lease.publish({"../x": np.zeros(3)}, step=0)
        with pytest.raises(InvalidRequest, match="at least one tensor"):
            await lease.publish({}, step=0)
        script.fence = "fence-of-another"
        with pytest.raises(LeaseSuperseded):
            await lease.publish(weights(1), step=0)
    assert not script.calls("AnnounceVersion")


async def test_versions_are_watched_as_they_come(both: Client) -> None:
    seen: list[int] = []

    async def watch() -> None:
        async for info in both.versions("run"):
            seen.append(info.version.version)  # noqa: PERF401 - as they come

    task = asyncio.create_task(watch())
    async with both.claim("run") as lease:
        for step in range(2):
            await lease.publish(weights(step), step=step)
    await wait_until(lambda: seen == [1, 2], what="both versions")
    task.cancel()


async def test_the_synchronous_face_does_the_same(coordinator: Any, relay: str, script: Any) -> None:
    script.finish(2)
    script.ttl_s = 60.0

    def work() -> list[str]:
        with SyncClient(coordinator.address, relay, security=SECURITY, patience_s=10.0) as client:
            assert client.run("run").run_id == "run"
            with client.claim("run") as lease:
                lease.acknowledge(["r"])
                version = lease.publish(weights(1), step=0)
                stream = lease.finished()
                seen = [next(stream).rollout_id, next(stream).rollout_id]
                stream.close()  # type: ignore[attr-defined]
            assert lease.lost
            assert client.fetch_weights("run")[0].version == version
        return seen

    assert await asyncio.to_thread(work) == ["f1", "f2"]
    assert len(script.calls("ReleaseLease")) == 1


def test_a_synchronous_client_that_cannot_be_made_leaves_no_thread() -> None:
    import threading

    before = threading.active_count()
    with pytest.raises(InvalidRequest, match="coordinator: "):
        SyncClient("nowhere", security=SECURITY)
    assert threading.active_count() == before
