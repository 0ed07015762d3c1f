"""Whatever sources do, a pull ends with the wanted version or with an error, never with anything else in the mirror."""

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, Unavailable, VersionUnavailable
from ebbtide.transfer import BlobCache, Mirror, Opener, TileSource
from ebbtide.types.weights import BlobSource, FetchPath, Holder
from ebbtide.weights import places
from tests.integration.transfer.conftest import Script, digest_at
from tests.integration.transfer.test_puller import FIRST, pull
from tests.support.waiting import wait_until
from tests.unit.transfer.filling import assert_right
from tests.unit.weights.chain import Link


def moody(rng: np.random.Generator, script: Script) -> Callable[[bytes, bytes], Any]:
    """Mostly sends what was asked for."""
    share = float(rng.choice([0.0, 0.02, 0.1]))

    def mangle(digest: bytes, data: bytes) -> Any:
        if rng.random() >= share:
            return digest, data
        match rng.integers(7):
            case 0:
                raise Unavailable("broke off")
            case 1:
                raise VersionUnavailable("let go of it")
            case 2:
                raise NoCapacity("is full", retry_after_s=0.01)
            case 3:
                return digest, data[: len(data) // 2]
            case 4:
                return digest, bytes(len(data))
            case 5:
                return bytes(rng.bytes(32)), data
            case _:
                return None

    return mangle


def ways_to(number: int, rng: np.random.Generator) -> list[FetchPath]:
    start = int(rng.integers(1, number + 1))
    ways = [FetchPath(start=start, keyframe=True, via=tuple(range(start + 1, number + 1)))]
    ways += [FetchPath(start=base, keyframe=False, via=tuple(range(base + 1, number + 1))) for base in range(1, number)]
    rng.shuffle(ways)
    return ways


@pytest.mark.parametrize("seed", range(15))
async def test_from_version_to_version_by_moody_sources(links: list[Link], serve: Any, pullers: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    relay, *peers = [await serve(links) for _ in range(3)]
    relay.script.sources = [peer.source(f"peer-{at}", site="here") for at, peer in enumerate(peers)]
    relay.script.again_s = 1.0
    for service in (relay, *peers):
        service.script.mangle = moody(rng, service.script)
    mirror, cache = Mirror(links[0].manifest, None), BlobCache(int(rng.choice([0, 1000, 1 << 20])))
    puller = pullers(relay, cache, streams=int(rng.integers(1, 5)), patience_s=20.0)
    for number in rng.integers(1, 6, size=5).tolist():
        relay.script.ways = ways_to(number, rng)
        if rng.random() < 0.3:  # one that is broken off, and what it did stays
            pulling = asyncio.create_task(pull(puller, mirror, links[rng.integers(5)]))
            await asyncio.wait([pulling], timeout=float(rng.random() * 0.02))
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
        await pull(puller, mirror, links[number - 1])
        assert_right(mirror, links[number - 1])


async def test_whatever_ends_a_pull_what_is_known_is_right(links: list[Link], serve: Any, pullers: Any) -> None:
    rng = np.random.default_rng(99)
    relay = await serve(links)
    mirror = Mirror(links[0].manifest, None)
    puller = pullers(relay, patience_s=0.0)
    ended = 0
    digests = {place: {digest_at(link.manifest, place) for link in links} for place in places(links[0].manifest)}
    for _ in range(40):
        relay.script.mangle = moody(rng, relay.script)
        number = int(rng.integers(1, 6))
        relay.script.ways = ways_to(number, rng)
        try:
            await pull(puller, mirror, links[number - 1])
        except EbbtideError:
            ended += 1
        held = mirror.held()
        assert all(digest in digests[place] for place, digest in held.items())
        mirror.mend(list(held))
        assert mirror.held() == held
    assert 0 < ended < 40


async def test_memory_is_bounded_whatever_the_version_weighs(big: list[Link], serve: Any, pullers: Any) -> None:
    relay = await serve(big)
    relay.script.ways = [FIRST]
    mirror = Mirror(big[0].manifest, None)
    puller = pullers(relay, streams=1)
    await puller.manifest("run", "policy", 1)
    tracemalloc.start()
    try:
        await pull(puller, mirror, big[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mirror.holds(big[0].manifest)
    assert peak < 16 << 20, f"{peak} bytes for 24 MiB"


class Fickle:
    """Opens sources; the first reading of one ends as gRPC ends a call whose channel is closed."""

    def __init__(self, open_source: Opener) -> None:
        self._open_source, self.sources, self.ended = open_source, list[TileSource](), False

    def __call__(self, source: BlobSource, reader: Holder) -> TileSource:
        self.sources.append(self._open_source(source, reader))
        return self

    async def tiles(self, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        async for found in self.sources[-1].tiles(digests):
            yield found
            if not self.ended:
                self.ended = True
                raise asyncio.CancelledError

    async def close(self) -> None:
        for source in self.sources:
            await source.close()


async def test_a_call_that_ends_as_if_cancelled_does_not_pass_for_done(
    big: list[Link], serve: Any, pullers: Any
) -> None:
    relay, peer = await serve(big), await serve(big)
    relay.script.ways = [FIRST]
    relay.script.sources = [peer.source("peer", site="here")]
    mirror = Mirror(big[0].manifest, None)
    puller = pullers(relay, streams=1)
    fickle = puller._open_source = Fickle(puller._open_source)
    done = await pull(puller, mirror, big[0])
    assert fickle.ended
    assert mirror.holds(big[0].manifest)
    assert set(done.bytes_by_source) == {"peer"}
    assert [ask.done for ask in relay.script.asked] == [False, False, True]


async def test_a_channel_that_is_closed_under_a_pull_costs_a_source(big: list[Link], serve: Any, pullers: Any) -> None:
    relay, peer = await serve(big), await serve(big)
    relay.script.ways, peer.script.gate_after = [FIRST], 4
    relay.script.sources = [peer.source("peer", site="here")]
    mirror = Mirror(big[0].manifest, None)
    puller = pullers(relay, silence_s=60.0)
    fickle = puller._open_source = Fickle(puller._open_source)
    fickle.ended = True
    pulling = asyncio.create_task(pull(puller, mirror, big[0]))
    await wait_until(lambda: peer.script.sent >= 4)
    await fickle.close()
    assert "weight-relay" in (await pulling).bytes_by_source
    assert mirror.holds(big[0].manifest)


async def test_a_version_of_another_geometry_is_refused(
    links: list[Link], big: list[Link], serve: Any, pullers: Any
) -> None:
    relay = await serve(links)
    with pytest.raises(InvalidRequest, match="other tensors"):
        await pull(pullers(relay), Mirror(big[0].manifest, None), links[0])
