"""How fast a source is counts by what it sends, not by what is done with it, and one that hardly sends is left."""

from typing import Any

import pytest

from ebbtide.transfer import Mirror, sources
from ebbtide.transfer.blob_fetcher import BlobFetcher
from ebbtide.types.weights import BlobSource
from tests.integration.transfer.test_puller import FIRST, pull
from tests.shaped_link import ShapedLink
from tests.unit.weights.chain import Link

MIB = 1 << 20


async def test_a_peer_on_a_slow_line_is_left_for_the_relay(
    big: list[Link], serve: Any, pullers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONG_S", 0.5)  # and all else as much faster than life
    monkeypatch.setattr(sources, "_SLOW_BYTES_PER_S", 8 * MIB)
    relay, peer = await serve(big), await serve(big)
    relay.script.ways = [FIRST]
    async with ShapedLink(peer.address, 3 * MIB) as link:
        relay.script.sources = [BlobSource(name="peer", address=link.address, site="here")]
        mirror = Mirror(big[0].manifest, None)
        done = await pull(pullers(relay), mirror, big[0])
    assert mirror.holds(big[0].manifest)
    assert done.bytes == 24 * MIB, "what had come was not fetched again"
    assert 0 < done.bytes_by_source["peer"] <= 12 * MIB
    assert not any(request.failed for request in relay.script.asked), "it did no wrong"
    mirror.close()


async def test_no_source_is_waited_for_while_what_came_is_used(
    big: list[Link], serve: Any, pullers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    verify = BlobFetcher._verify

    async def watch(fetcher: Any, batch: Any, source: Any) -> None:
        running.append(len(source._clocks))
        await verify(fetcher, batch, source)

    monkeypatch.setattr(BlobFetcher, "_verify", watch)
    relay = await serve(big)
    relay.script.ways = [FIRST]
    mirror = Mirror(big[0].manifest, None)
    await pull(pullers(relay, streams=1), mirror, big[0])
    assert set(running) == {0}
    mirror.close()
