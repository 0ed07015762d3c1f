"""Over real gRPC: a link is shared by readers, not by streams, sources follow the rules, and all of it can be seen."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from tests.integration.weight_relay.fanout import KIB, RunningRelay, Version, running
from tests.support.waiting import wait_until

RATE = 4000 * KIB


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with running(tmp_path / "relay", site="home", link_limits=(f"a={RATE}",)) as relay:
        yield relay


async def test_a_reader_with_many_streams_gets_no_more_of_a_link_than_one_with_one(relay: RunningRelay) -> None:
    version = Version(1)
    await version.publish(relay.relay)
    digests = [digest for entry in version.manifest.tensors for digest in entry.digests]
    got = {"greedy": 0, "modest": 0}

    async def read(reader: str) -> None:
        while True:
            call = relay.stub.FetchTiles(pb.FetchTilesRequest(digests=digests, reader=reader, site="a"))
            async for tile in call:
                got[reader] += len(tile.data)

    streams = [asyncio.create_task(read(reader)) for reader in ["modest", *["greedy"] * 8]]
    await asyncio.wait(streams, timeout=1.5)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    assert got["modest"] == pytest.approx(got["greedy"], rel=0.2)
    [link] = (await relay.describe()).links
    assert (link.site, link.limit) == ("a", RATE)
    assert sum(got.values()) == pytest.approx(1.5 * RATE, rel=0.3)
    assert link.bytes >= sum(got.values())


async def test_sources_are_near_first_and_this_relay_for_each_sites_first_alone(relay: RunningRelay) -> None:
    await Version(1).publish(relay.relay)
    assert await relay.find("a0", 1, site="a", address="a0:1") == [""]
    assert await relay.find("a1", 1, site="a", address="a1:1") == ["a0:1"]
    assert await relay.find("b0", 1, site="b", address="b0:1") == [""]
    assert await relay.find("a0", 1, site="a", address="a0:1", done=True) == []
    assert set(await relay.find("a2", 1, site="a")) == {"a0:1", "a1:1"}
    assert await relay.find("c0", 1, site="c") == ["a0:1"]
    assert await relay.find("a1", 1, site="a", address="a1:1", failed=["a0:1"]) == [""]


async def test_watching_without_a_run_tells_of_all_runs(relay: RunningRelay) -> None:
    version = Version(1)
    told: list[tuple[str, int]] = []

    async def watch() -> None:
        async for info in relay.stub.WatchVersions(pb.WatchVersionsRequest()):
            told.append((info.run_id, info.version.version))  # noqa: PERF401 - one by one, as they come

    watching = asyncio.create_task(watch())
    await version.publish(relay.relay)
    await wait_until(lambda: told == [("run", 1)])
    await Version(2, base=version).publish(relay.relay)
    await wait_until(lambda: told == [("run", 1), ("run", 2)])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_what_a_relay_knows_of_a_run_is_told(relay: RunningRelay) -> None:
    first = Version(1)
    second = Version(2, base=first)
    for version in (first, second):
        await version.publish(relay.relay)
    await relay.find("w0", 2, site="a", address="w0:1", have=[1])
    await relay.find("w1", 2, site="a", done=True, install_s=0.5)
    state = await relay.describe()
    assert [(item.info.version.version, item.keyframe) for item in state.versions] == [(1, True), (2, False)]
    [patch] = state.versions[1].patches
    assert second.patch is not None
    assert (patch.base, patch.size, patch.composed) == (1, second.patch.size, False)
    assert patch.density == pytest.approx(0.03, rel=0.1)
    shown = [(item.holder.name, item.version, item.done, item.install_s) for item in state.holders]
    assert shown == [("w0", 2, False, 0.0), ("w1", 2, True, 0.5)]
    assert all(item.seen_s < 10 for item in state.holders)


async def test_names_longer_than_a_holders_are_refused(relay: RunningRelay) -> None:
    for field, long in (("reader", "x" * 257), ("site", "x" * 129)):
        with pytest.raises(InvalidRequest, match=field), translated("relay"):
            async for _ in relay.stub.FetchTiles(pb.FetchTilesRequest(**{field: long})):  # type: ignore[arg-type]
                pass
    assert (await relay.describe()).links == ()


async def test_static_copies_beside_an_upstream_are_refused_by_name(tmp_path: Path) -> None:
    both = RelaySettings(data_dir=str(tmp_path / "relay"), upstream="127.0.0.1:1", static_copies=("http://copy",))
    with pytest.raises(InvalidRequest, match="static_copies: is for a relay without an upstream"):
        WeightRelay(both)


async def test_limits_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="link_limits: 'fast' must be"):
        WeightRelay(RelaySettings(data_dir=str(tmp_path / "relay"), link_limits=("fast",)))
