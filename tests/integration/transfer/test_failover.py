"""Sources that break, stall and lie, pullers that are killed: what has come stays, the rest comes from others."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import ChunkCorrupt, NoCapacity, Unavailable
from ebbtide.transfer import Mirror
from ebbtide.types.weights import FetchPath
from tests.integration.transfer.conftest import SECURITY, breaking, needed
from tests.integration.transfer.test_puller import FIRST, NEWEST, pull
from tests.support.waiting import wait_until
from tests.unit.transfer.filling import assert_right
from tests.unit.weights.chain import Link


@pytest.fixture
def mirror(links: list[Link]) -> Mirror:
    return Mirror(links[0].manifest, None)


async def test_a_source_that_breaks_at_any_tile_is_replaced(links: list[Link], serve: Any, pullers: Any) -> None:
    relay, peer = await serve(links), await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [peer.source("peer", site="here")]
    puller = pullers(relay, streams=1)
    total = needed(links, NEWEST)
    for after in range(0, 60, 3):
        peer.script.mangle = breaking(after)
        relay.script.asked.clear()
        mirror = Mirror(links[0].manifest, None)
        done = await pull(puller, mirror, links[4])
        assert_right(mirror, links[4])
        assert done.bytes == total, "what had come was not fetched again"
        assert set(done.bytes_by_source) <= {"peer", "weight-relay"}
        assert bool(done.bytes_by_source.get("peer")) == (after > 0)


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_source_that_dies_is_replaced_in_the_middle(
    big: list[Link], serve: Any, pullers: Any, streams: int
) -> None:
    relay, peer = await serve(big), await serve(big)
    relay.script.ways = [FIRST]
    relay.script.sources = [peer.source("peer", site="here")]
    peer.script.gate_after = 7
    mirror = Mirror(big[0].manifest, None)
    pulling = asyncio.create_task(pull(pullers(relay, streams=streams, silence_s=60.0), mirror, big[0]))
    await wait_until(lambda: peer.script.sent >= 7)
    await peer.stop()
    done = await pulling
    assert mirror.holds(big[0].manifest)
    assert done.bytes == 24 << 20
    assert done.bytes_by_source["peer"] <= 7 << 20


async def test_a_source_that_stalls_is_replaced(big: list[Link], serve: Any, pullers: Any) -> None:
    relay, peer = await serve(big), await serve(big)
    relay.script.ways = [FetchPath(start=1, keyframe=False, via=(2,))]
    relay.script.sources = [peer.source("peer", site="here")]
    peer.script.gate_after = 5
    mirror = Mirror(big[0].manifest, None)
    relay.script.ways, relay.script.again_s = [FIRST], 0.0
    done = await pull(pullers(relay, silence_s=0.3), mirror, big[0])
    assert mirror.holds(big[0].manifest)
    assert set(done.bytes_by_source) == {"peer", "weight-relay"}


@pytest.mark.parametrize(
    "lie",
    [
        lambda digest, data: (digest, data[:-1] + bytes([data[-1] ^ 1])),
        lambda digest, data: (digest, data[:-1]),
        lambda digest, data: (digest, bytes(4 << 19)),
        lambda digest, data: (bytes(32), data),
        lambda digest, data: (b"short", data),
        lambda digest, data: None,
    ],
    ids=["flipped", "cut", "oversized", "not asked for", "no digest", "nothing"],
)
async def test_a_source_that_lies_is_replaced(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any, lie: Any
) -> None:
    relay, peer = await serve(links), await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [peer.source("peer", site="here")]
    sent = 0

    def mangle(digest: bytes, data: bytes) -> Any:
        nonlocal sent
        sent += 1
        return lie(digest, data) if sent == 9 else (digest, data)

    peer.script.mangle = mangle
    await pull(pullers(relay, streams=1), mirror, links[4])
    assert_right(mirror, links[4])


async def test_a_source_that_repeats_itself_is_replaced(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay, peer = await serve(links), await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [peer.source("peer", site="here")]
    first = links[4].manifest.tensors[0].digests[0]
    peer.script.mangle = lambda digest, data: (first, peer.script.blobs[first])
    done = await pull(pullers(relay, streams=1), mirror, links[4])
    assert_right(mirror, links[4])
    assert done.bytes_by_source.get("peer", 0) <= len(peer.script.blobs[first])


async def test_the_relay_is_told_who_failed_and_not_who_lacked_something(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay, broken, poor = await serve(links), await serve(links), await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [broken.source("broken", site="here"), poor.source("poor", site="here")]
    broken.script.mangle, poor.script.blobs = breaking(1), {}
    failures = iter([1])

    def once(digest: bytes, data: bytes) -> Any:
        if next(failures, None):
            raise Unavailable("for a moment")
        return digest, data

    relay.script.mangle = once
    await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    failed = [set(ask.failed) for ask in relay.script.asked]
    assert {broken.address, relay.address} in failed
    assert not any(poor.address in addresses for addresses in failed)


async def test_what_is_near_is_asked_before_what_is_far(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay, near, far = await serve(links), await serve(links), await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [far.source("far", site="there"), near.source("near", site="here")]
    done = await pull(pullers(relay, site="here"), mirror, links[4])
    assert set(done.bytes_by_source) == {"near"}
    assert not far.script.fetched
    assert not relay.script.fetched


async def test_what_is_busy_nearby_is_waited_for(big: list[Link], serve: Any, pullers: Any) -> None:
    relay, near = await serve(big), await serve(big)
    relay.script.ways = [FIRST]
    relay.script.sources = [near.source("near", site="here")]
    calls = iter(range(10))

    def busy(digest: bytes, data: bytes) -> Any:
        if next(calls, None) is not None:
            raise NoCapacity("is full", retry_after_s=0.05)
        return digest, data

    near.script.mangle = busy
    done = await pull(pullers(relay), Mirror(big[0].manifest, None), big[0])
    assert set(done.bytes_by_source) == {"near"}
    assert not relay.script.fetched


async def test_only_what_a_source_lacks_comes_from_farther(big: list[Link], serve: Any, pullers: Any) -> None:
    relay, near = await serve(big), await serve(big)
    relay.script.ways = [FIRST]
    relay.script.sources = [near.source("near", site="here")]
    del near.script.blobs[big[0].manifest.tensors[2].digests[1]]
    mirror = Mirror(big[0].manifest, None)
    done = await pull(pullers(relay), mirror, big[0])
    assert mirror.holds(big[0].manifest)
    assert done.bytes_by_source["weight-relay"] <= 2 << 20, "no more than the rest of a batch"


async def test_better_sources_are_learnt_on_the_way(big: list[Link], serve: Any, pullers: Any) -> None:
    relay, peer = await serve(big), await serve(big)
    relay.script.ways, relay.script.again_s, relay.script.gate_after = [FIRST], 0.01, 3
    mirror = Mirror(big[0].manifest, None)
    pulling = asyncio.create_task(pull(pullers(relay, silence_s=60.0, streams=1), mirror, big[0]))
    await wait_until(lambda: relay.script.sent >= 3)
    relay.script.sources = [peer.source("peer", site="here")]
    asked = len(relay.script.asked)
    await wait_until(lambda: len(relay.script.asked) > asked + 1, what="another question")
    relay.script.gate.set()
    done = await pulling
    assert done.bytes_by_source.get("peer")
    assert mirror.holds(big[0].manifest)


async def test_patience_waits_for_a_relay_that_is_away(
    links: list[Link], mirror: Mirror, serve: Any, pullers: Any
) -> None:
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    puller = pullers(relay)
    manifest = await puller.manifest("run", "policy", 5)
    await relay.stop()
    pulling = asyncio.create_task(puller.pull("run", manifest.version, mirror, manifest))
    await asyncio.wait([pulling], timeout=0.3)
    assert not pulling.done()
    await relay.start()
    await pulling
    assert_right(mirror, links[4])
    await relay.stop()
    with pytest.raises(Unavailable, match=relay.address):
        await pullers(relay, patience_s=0.2).pull("run", manifest.version, mirror, manifest)


async def test_lies_alone_end_with_patience(links: list[Link], mirror: Mirror, serve: Any, pullers: Any) -> None:
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.mangle = lambda digest, data: (digest, bytes(len(data)))
    with pytest.raises(ChunkCorrupt):
        await pull(pullers(relay, patience_s=0.3), mirror, links[4])
    assert mirror.held() == {}


async def test_a_cancelled_pull_writes_no_more(big: list[Link], serve: Any, pullers: Any) -> None:
    relay = await serve(big)
    relay.script.ways = [FIRST]
    mirror = Mirror(big[0].manifest, None)
    pulling = asyncio.create_task(pull(pullers(relay), mirror, big[0]))
    await wait_until(mirror.held)
    pulling.cancel()
    await asyncio.wait([pulling])
    assert pulling.cancelled()
    before = mirror.held()
    async with mirror.hold():
        await asyncio.to_thread(os.sched_yield)
    assert mirror.held() == before
    mirror.mend(list(before))
    assert mirror.held() == before


# -- processes ---------------------------------------------------------------------------------------------------

READER = """
import asyncio, sys
from pathlib import Path
from ebbtide.rpc.channel import open_channel
from ebbtide.auth.security import ClientSecurity
from ebbtide.transfer import Mirror, Puller, opener
from ebbtide.types.weights import Holder
from ebbtide.v1.weights_pb2_grpc import WeightsStub

async def main(address, token, folder, name):
    security = ClientSecurity(token=token)
    async with open_channel(address, security) as channel:
        puller = Puller(WeightsStub(channel), address, holder=lambda: Holder(name=name), patience_s=20.0,
                        open_source=opener(security), silence_s=60.0)
        manifest = await puller.manifest("run", "policy", 1)
        mirror = Mirror(manifest, Path(folder))
        async with mirror.hold():
            done = await puller.pull("run", manifest.version, mirror, manifest)
        assert mirror.holds(manifest)
        print(done.bytes, done.reused, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        mirror.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def reader(address: str, folder: Path, name: str) -> asyncio.subprocess.Process:
    arguments = [sys.executable, "-c", READER, address, SECURITY.token, str(folder), name]
    return await asyncio.create_subprocess_exec(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def told(process: asyncio.subprocess.Process) -> tuple[int, int]:
    assert process.stdout is not None
    size, reused = (await asyncio.wait_for(process.stdout.readline(), 60)).split()
    return int(size), int(reused)


async def test_processes_of_a_host_fetch_once(big: list[Link], tmp_path: Path, serve: Any) -> None:
    relay = await serve(big)
    relay.script.ways = [FIRST]
    processes = [await reader(relay.address, tmp_path / "mirrors", name) for name in "ab"]
    found = sorted([await told(process) for process in processes])
    assert found == [(0, 24), (24 << 20, 0)]
    for process in processes:
        await process.communicate(b"")
    assert not (tmp_path / "mirrors").exists()


async def killed(service: Any, folder: Path, after: int) -> None:
    """A reader that is killed once `after` tiles were sent to it."""
    service.script.sent, service.script.gate_after = 0, after
    process = await reader(service.address, folder, "killed")
    await wait_until(lambda: service.script.sent >= after, timeout=30)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    service.script.gate_after = None


def is_gone(folder: Path) -> bool:
    return not folder.exists()


async def gone_on_with(service: Any, folder: Path) -> int:
    """How many tiles the next reader found in the mirror."""
    process = await reader(service.address, folder, "next")
    size, reused = await told(process)
    assert size + (reused << 20) == 24 << 20
    await process.communicate(b"")
    assert is_gone(folder)
    return reused


async def test_what_killed_pullers_did_is_gone_on_with(big: list[Link], tmp_path: Path, serve: Any) -> None:
    relay = await serve(big)
    relay.script.ways = [FIRST]
    for after in (5, 8, 7):
        await killed(relay, tmp_path / "mirrors", after)
    assert await gone_on_with(relay, tmp_path / "mirrors") >= 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_a_puller_killed_at_any_tile_is_gone_on_with(big: list[Link], tmp_path: Path, serve: Any) -> None:
    relay = await serve(big)
    relay.script.ways = [FIRST]
    found = []
    for after in range(1, 24):
        await killed(relay, tmp_path / "mirrors", after)
        found.append(await gone_on_with(relay, tmp_path / "mirrors"))
    assert all(reused <= after for after, reused in enumerate(found, 1))
    assert found[-1] >= 12
