"""Workers serve on what they verified; who reads from them believes nothing, and goes elsewhere when they fail."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import Internal, InvalidRequest, NoCapacity, Unavailable, VersionUnavailable
from ebbtide.rpc.channel import Channel, open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.types.fleet import WorkerKind
from ebbtide.v1 import weights_pb2
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import tile_digest
from tests.fakes.links import Way
from tests.fakes.scripted_relay import TOKEN
from tests.integration.rollout_worker.reading import Reads, pulled
from tests.support.waiting import wait_until

House = Any  # the fixtures' classes live in conftest.py
Houses = Callable[[str], Awaitable[Any]]
PEER = {"peer_listen": "127.0.0.1:0"}


def digests(house: House, number: int) -> list[bytes]:
    return [digest for entry in house.relay.manifests[number].tensors for digest in entry.digests]


async def address(house: House) -> str:
    """Where the worker serves others, as it told the relay."""
    found = await wait_until(lambda: [one.holder for one in house.relay.told if one.holder.name == house.name])
    return str(found[-1].address)


@pytest.fixture
async def channel(house: House) -> AsyncIterator[Channel]:
    """To a worker that serves its peers, two at once."""
    await house.worker(**PEER, peer_readers=2)
    async with open_channel(await address(house), ClientSecurity(token=TOKEN)) as opened:
        yield opened


async def fetch(channel: Channel, wanted: list[bytes], reader: str = "r1") -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with translated("worker"):
        request = weights_pb2.FetchTilesRequest(digests=wanted, reader=reader)
        async for tile in WeightsStub(channel).FetchTiles(request):
            found[tile.digest] = tile.data
    return found


async def test_a_worker_serves_the_tiles_that_it_holds_in_the_order_asked_for(house: House, channel: Channel) -> None:
    wanted = digests(house, 1)[::-1]
    found = await fetch(channel, wanted)
    assert list(found) == wanted
    assert all(tile_digest(data) == digest for digest, data in found.items())


async def test_a_worker_refuses_what_it_does_not_hold_and_what_is_no_digest(house: House, channel: Channel) -> None:
    with pytest.raises(VersionUnavailable, match="another source"):
        await fetch(channel, [b"x" * 32])
    with pytest.raises(InvalidRequest, match="32 bytes"):
        await fetch(channel, [b"x" * 8])


async def test_a_worker_offers_nothing_but_blobs(house: House, channel: Channel) -> None:
    with pytest.raises(Internal, match="does not offer"), translated("worker"):
        await WeightsStub(channel).FindWay(weights_pb2.FindWayRequest())


async def test_a_worker_serves_nobody_without_the_token(house: House, channel: Channel) -> None:
    async with grpc.aio.insecure_channel(await address(house)) as stranger:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in WeightsStub(stranger).FetchTiles(weights_pb2.FetchTilesRequest(digests=[])):
                pass
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_worker_passes_on_what_is_still_arriving_to_so_many_at_once(house: House, channel: Channel) -> None:
    relay = house.relay
    relay.flowing.clear()
    asked = relay.asked
    house.coordinator.install(relay.publish(2))
    await wait_until(lambda: relay.asked > asked)
    readers = [asyncio.create_task(fetch(channel, digests(house, 2), name)) for name in ("r1", "r1", "r1", "r2")]
    await wait_until(lambda: streams() == 4, what="two readers")
    with pytest.raises(NoCapacity) as full:
        await fetch(channel, digests(house, 2), "r3")
    assert full.value.retry_after_s > 0
    assert not any(reader.done() for reader in readers)
    relay.flowing.set()
    for reader in readers:
        assert set(await reader) == set(digests(house, 2))
    assert relay.served == 8, "once for this worker, and for nobody else"


def streams() -> int:
    return int(REGISTRY.get_sample_value("ebbtide_worker_peer_streams") or 0)


async def test_readers_of_a_worker_that_leaves_are_told_to_go_elsewhere(house: House) -> None:
    worker = await house.worker(**PEER)
    async with open_channel(await address(house), ClientSecurity(token=TOKEN)) as channel:
        relay = house.relay
        relay.flowing.clear()
        asked = relay.asked
        house.coordinator.install(relay.publish(2))
        await wait_until(lambda: relay.asked > asked)
        reader = asyncio.create_task(fetch(channel, digests(house, 2)))
        await wait_until(lambda: streams() == 1)
        await worker.end()
        with pytest.raises((Unavailable, VersionUnavailable)):
            await reader


@pytest.mark.parametrize("version", [0, 1])
async def test_a_worker_that_serves_others_ends_without_a_failure(house: House, version: int) -> None:
    for _ in range(5):
        worker = await house.worker(version=version, **PEER)
        await worker.end()
        assert worker.shutdown.failure is None
        house.coordinator.heard.clear()
        house.coordinator.attaches.clear()


async def pair(houses: Houses, tmp_path: Path, **changes: Any) -> tuple[House, House, str]:
    """A worker that serves version 1, one of another host that has none, and the address of the first."""
    first, second = await houses("w1"), await houses("w2")
    await first.worker(**PEER)
    where = await address(first)
    await second.worker(version=0, mirror_dir=str(tmp_path / "other-host"), **changes)
    return first, second, where


async def test_a_version_comes_from_a_peer_that_the_relay_names(houses: Houses, tmp_path: Path, reads: Reads) -> None:
    _, second, where = await pair(houses, tmp_path)
    relay = second.relay
    relay.sources = [weights_pb2.BlobSource(name="w1", address=where)]
    before = pulled("peer")
    second.coordinator.install(relay.manifests[1].version)
    await second.coordinator.hear("installed")
    assert relay.served == 4
    assert pulled("peer") - before == 1024
    assert reads[0] == reads[1]


async def test_a_peer_that_is_cut_off_in_the_midst_of_a_blob_is_replaced(
    houses: Houses, tmp_path: Path, reads: Reads
) -> None:
    _, second, where = await pair(houses, tmp_path)
    relay = second.relay
    way = await Way.open(where)
    try:
        way.back.limit = 700  # behind the second blob or so
        relay.sources = [weights_pb2.BlobSource(name="w1", address=way.address)]
        second.coordinator.install(relay.manifests[1].version)
        await wait_until(lambda: way.back.silent or reads[1:], what="a part of the version")
        way.cut()
        await second.coordinator.hear("installed")
    finally:
        await way.close()
    assert reads[0] == reads[1]
    assert "install_failed" not in second.coordinator.heard


class Liar:
    """Serves other bytes than it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    async def blobs(self, digests: Any, reader: str) -> AsyncIterator[tuple[bytes, bytes]]:
        self.asked += 1
        for digest in digests:
            yield digest, bytes(256)


async def test_a_peer_that_lies_is_not_believed(houses: Houses, tmp_path: Path, reads: Reads) -> None:
    from ebbtide.auth.security import ServerSettings
    from ebbtide.rollout_worker.installs.peers import SERVICE, PeerServicer, add_to_server
    from ebbtide.rpc.server import Server

    liar: Any = Liar()
    server = Server(ServerSettings(listen="127.0.0.1:0", token=TOKEN), [(add_to_server, PeerServicer(liar), SERVICE)])
    await server.start()
    try:
        _, second, _ = await pair(houses, tmp_path)
        relay = second.relay
        relay.sources = [weights_pb2.BlobSource(name="liar", address=server.address)]
        second.coordinator.install(relay.manifests[1].version)
        await second.coordinator.hear("installed")
    finally:
        await server.stop(0)
    assert liar.asked > 0
    assert relay.served == 8, "the relay had to serve both"
    assert reads[0] == reads[1]


async def test_the_relay_hears_who_holds_what_again_and_again(house: House) -> None:
    await house.worker(**PEER, site="here", kind=WorkerKind.SPOT, script={"install_s": 0.05})
    told = house.relay.told
    await wait_until(lambda: sum(one.install_s > 0 for one in told) >= 2, what="telling it twice")
    last = told[-1]
    assert (last.run_id, last.policy, last.version, last.done) == ("run-1", "policy", 1, True)
    assert last.install_s >= 0.05
    holder = last.holder
    assert (holder.name, holder.site, holder.lasting) == ("w1", "here", False)
    assert holder.address.startswith("127.0.0.1:")
    assert holder.host


async def test_a_worker_that_serves_nobody_gives_no_address(house: House) -> None:
    await house.worker()
    assert await address(house) == ""
    assert house.relay.told[-1].holder.lasting


async def test_an_address_that_nobody_can_reach_is_refused_before_the_engine_boots(house: House) -> None:
    for flags in ({"peer_listen": "0.0.0.0:0"}, {"peer_listen": "10.0.0.1:0"}, {"peer_listen": "nowhere"}):
        worker = await house.worker(version=0, script={"boot_s": 0.0}, **flags)
        with pytest.raises(InvalidRequest):
            await worker.task


async def test_a_port_that_is_in_use_is_refused_by_the_name_of_its_setting(houses: Houses) -> None:
    first, second = await houses("w1"), await houses("w2")
    await first.worker(**PEER)
    worker = await second.worker(version=0, peer_listen=await address(first))
    with pytest.raises(InvalidRequest, match=r"^peer_listen: cannot bind"):
        await worker.task


@pytest.mark.parametrize("wrong", ["open to others", "a link", "a file"])
async def test_a_folder_of_mirrors_that_cannot_serve_is_refused_before_the_engine_boots(
    house: House, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fakes.scripted_engine import ScriptedEngine

    booted: list[ScriptedEngine] = []
    monkeypatch.setattr(ScriptedEngine, "start", booted.append)
    folder = tmp_path / "wrong"
    if wrong == "open to others":
        folder.mkdir(0o755)
    elif wrong == "a link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch(0o600)
    worker = await house.worker(version=0, mirror_dir=str(folder))
    with pytest.raises(InvalidRequest, match=r"^mirror_dir: "):
        await worker.task
    assert not booted
