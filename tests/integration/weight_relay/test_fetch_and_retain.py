"""Fetches resume, damage on disk never goes out, and only the newest versions stay."""

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity, VersionUnavailable
from ebbtide.types.weights import PolicyVersion
from tests.integration.weight_relay.signed_relay import SignedRelay
from tests.support.waiting import wait_until

MIB = 1 << 20


def version(number: int, policy: str = "policy") -> PolicyVersion:
    return PolicyVersion(policy=policy, version=number)


def weights(seed: int, mib: int = 1) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).integers(0, 256, mib * MIB, dtype="u1")}


async def test_a_fetch_goes_on_with_the_tiles_still_missing(wire: Any, relay: SignedRelay, sample: Any) -> None:
    await relay.publish("run", sample.version, sample.weights)
    digests = [digest for entry in sample.manifest.tensors for digest in entry.digests]
    found = await wire.fetch(digests, most=5)
    rest = await wire.fetch([digest for digest in digests if digest not in found])
    assert len(rest) == 7
    assert found | rest == sample.tiles


async def test_a_fetch_survives_the_relays_death(process: Any, relay: SignedRelay) -> None:
    many = {f"w{i}": np.random.default_rng(i).integers(0, 256, 2 * MIB, dtype="u1") for i in range(24)}
    await relay.publish("run", version(1), many)
    fetch = asyncio.create_task(relay.fetch("run", "policy", 1))
    await asyncio.wait({fetch}, timeout=0.05)
    process.end(signal.SIGKILL)
    await process.start()
    manifest, tensors = await fetch
    assert manifest.version.version == 1
    assert all(bytes(tensors[name].data) == value.tobytes() for name, value in many.items())


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
async def test_damage_on_disk_is_refused_at_the_read_and_healed_by_publishing_again(
    damage: str, process: Any, wire: Any, relay: SignedRelay, sample: Any
) -> None:
    await relay.publish("run", sample.version, sample.weights)
    path = process.data / "tiles" / list(sample.tiles)[3].hex()
    data = bytearray(path.read_bytes())
    data[1000] ^= 0x10
    path.unlink() if damage == "delete" else path.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(ChunkCorrupt, match="damaged on the relay's disk"):
        await wire.fetch(sample.tiles)
    with pytest.raises(VersionUnavailable, match="held: none"):
        await relay.fetch("run", "policy", 1)
    await relay.publish("run", sample.version, sample.weights)
    await relay.fetch("run", "policy", 1)


@pytest.mark.parametrize("what", ["tile", "manifest"])
async def test_a_version_truncated_on_disk_is_not_found_again(
    what: str, process: Any, relay: SignedRelay, sample: Any
) -> None:
    await relay.publish("run", sample.version, sample.weights)
    await relay.publish("run", version(2), weights(2))
    process.end(signal.SIGKILL)
    path = process.manifests()[0] if what == "manifest" else process.data / "tiles" / list(sample.tiles)[3].hex()
    path.write_bytes(path.read_bytes()[:-1])
    await process.start()
    assert (await relay.fetch("run", "policy", 0))[0].version.version == 2
    with pytest.raises(VersionUnavailable, match="held: 2"):
        await relay.fetch("run", "policy", 1)
    assert len(process.tiles()) == 1
    assert len(process.manifests()) == 1


async def test_the_newest_versions_stay_and_their_tiles_alone(process: Any, relay: SignedRelay) -> None:
    process.end(signal.SIGTERM)
    await process.start("--keep-versions", "2")
    shared = np.ones(MIB, "u1")
    for number in range(1, 6):
        await relay.publish("run", version(number), {**weights(number), "shared": shared})
    assert [path.stem for path in process.manifests()] == ["0000000004", "0000000005"]
    assert len(process.tiles()) == 3
    with pytest.raises(VersionUnavailable, match="held: 4, 5"):
        await relay.fetch("run", "policy", 3)
    await relay.fetch("run", "policy", 4)


async def test_the_byte_budget_is_kept_and_never_costs_a_live_newest_version(process: Any, relay: SignedRelay) -> None:
    process.end(signal.SIGTERM)
    await process.start("--budget-bytes", str(4 * MIB + (64 << 10)))
    await relay.publish("other", version(1), weights(9))
    for number in (1, 2, 3):
        await relay.publish("run", version(number), weights(number))
    await relay.publish("run", version(4), weights(4, mib=2))
    assert len(process.tiles()) == 4
    await relay.fetch("other", "policy", 1)
    relay.peer.patience_s = 0.5
    with pytest.raises(NoCapacity, match="--budget-bytes"):
        await relay.publish("run", version(5), weights(5, mib=2))
    with pytest.raises(InvalidRequest, match=r"more than \d+ bytes"):
        await relay.publish("run", version(6), weights(6, mib=5))
    assert (await relay.fetch("run", "policy", 0))[0].version.version == 4


async def test_what_a_dead_publisher_staged_is_cleaned(process: Any, wire: Any, sample: Any) -> None:
    process.end(signal.SIGTERM)
    await process.start("--stage-ttl-s", "0.4")
    await wire.begin(sample.manifest)
    await wire.put(dict(list(sample.tiles.items())[:3]))
    assert len(process.tiles()) == 3
    await wait_until(lambda: not process.tiles(), what="the stage's end")


async def test_watchers_see_each_version_once_also_over_a_restart(process: Any, relay: SignedRelay) -> None:
    await relay.publish("run", version(1), weights(1))
    seen: list[int] = []

    async def watch() -> None:
        async for info in relay.versions("run", "policy"):
            assert info.size == MIB
            seen.append(info.version.version)

    task = asyncio.create_task(watch())
    await wait_until(lambda: seen == [1], what="the first version")
    await relay.publish("run", version(2), weights(2))
    await relay.publish("run", version(1, policy="another"), weights(3))
    await wait_until(lambda: seen == [1, 2], what="the second")
    assert process.end(signal.SIGTERM) == 0
    await process.start()
    await relay.publish("run", version(3), weights(3))
    await wait_until(lambda: len(seen) == 3, what="the third")
    assert seen == [1, 2, 3]
    task.cancel()


async def test_a_second_relay_on_one_directory_is_refused(process: Any, relay: SignedRelay, tmp_path: Any) -> None:
    await relay.publish("run", version(1), weights(1))
    (tmp_path / "second").mkdir()
    second = type(process)(tmp_path / "second", process.data)
    start = asyncio.create_task(second.start())
    await wait_until(lambda: second._process is not None and second._process.poll() is not None, timeout=20)
    assert second._process.returncode == 1
    start.cancel()
